"""What the forward pass of WKV7 leaves to the backward pass, whichever implementation runs."""

from typing import NamedTuple

from rwkv_jax._typing import Keys, States, Values

CHUNK = 64
"""Tokens between two saved states; `states[:, n]` is the state before token `n * CHUNK`. The native
kernels have the same number as `kChunk`."""


class Residuals(NamedTuple):
    r: Keys
    w: Keys
    k: Keys
    v: Values
    a: Keys
    b: Keys
    states: States
