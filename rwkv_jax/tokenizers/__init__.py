"""Tokenizers: text to the tokens of a language model, and back.

`load` gives the tokenizer with a name or in a file, `for_vocabulary` finds the name that fits a
model, and a `Stream` turns tokens into text one after another. The tokenizers "world" and those of
`tokenizer.json` files need packages, which `pip install 'rwkv-jax[text]'` installs.
"""

from rwkv_jax.tokenizers._loading import for_vocabulary as for_vocabulary
from rwkv_jax.tokenizers._loading import load as load
from rwkv_jax.tokenizers._tokenizer import Stream as Stream
from rwkv_jax.tokenizers._tokenizer import Tokenizer as Tokenizer
