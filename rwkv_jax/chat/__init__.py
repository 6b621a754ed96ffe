"""Conversations as text: the formats in which chat models were trained.

A conversation is a sequence of messages, each a dictionary with a `role` and a `content`, as in the
API of OpenAI. `G1` writes them as the RWKV-7 G1 models and the World models have seen them, and a
`Template` as the `chat_template.jinja` in the folder of a model says.
"""

from rwkv_jax.chat._g1 import G1 as G1
from rwkv_jax.chat._messages import Message as Message
from rwkv_jax.chat._template import Template as Template
from rwkv_jax.chat._template import template_in as template_in
