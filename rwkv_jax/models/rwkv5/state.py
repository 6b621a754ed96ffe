"""The state that tokens leave for the tokens after them, in the operator."""

import jax.numpy as jnp

from rwkv_jax import _typing
from rwkv_jax.models.rwkv5.parameters import TimeMixParams


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv5` before the first token: zeros."""
    heads = len(params.time_decay)
    head_size = len(params.receptance.weight) // heads
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)
