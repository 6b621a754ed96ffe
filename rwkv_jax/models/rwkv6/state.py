"""The state that tokens leave for the tokens after them, in the operator."""

import jax.numpy as jnp

from rwkv_jax import _typing
from rwkv_jax.models.rwkv6.parameters import TimeMixParams


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv6` before the first token: zeros."""
    heads, head_size = params.time_faaaa.shape
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)
