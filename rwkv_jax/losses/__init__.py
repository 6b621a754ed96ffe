"""Losses of language models, from what their head makes logits of.

The logits of a batch, tokens times vocabulary, are the largest array of training by far.
`cross_entropy` takes the hidden states before the head and the weight of the head instead, and
computes logits for a chunk of tokens at a time. `in_pieces` reads rows that are longer than memory:
activations are in memory for one piece of them.
"""

from rwkv_jax.losses._cross_entropy import cross_entropy as cross_entropy
from rwkv_jax.losses._in_pieces import in_pieces as in_pieces
