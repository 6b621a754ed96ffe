"""What the forward pass of WKV7 leaves to the backward pass, whichever implementation runs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rwkv_jax._dispatch import Options
from rwkv_jax._typing import Keys, States, Values

CHUNK = 64
"""Tokens between two saved states; `states[:, n]` is the state before token `n * CHUNK`. The native
kernels have the same number as `kChunk`."""


def states_dtype(options: Options, dtype: Any) -> Any:
    """The dtype of saved states for inputs of a dtype. For 16-bit inputs float32 states would take
    as much memory as two inputs with K = 64, four with 128; their rounding costs no more than that
    of an input."""
    exact = dtype == jnp.float32 or options.precision == jax.lax.Precision.HIGHEST
    return jnp.float32 if exact else jnp.bfloat16


class Residuals(NamedTuple):
    r: Keys
    w: Keys
    k: Keys
    v: Values
    a: Keys
    b: Keys
    states: States
