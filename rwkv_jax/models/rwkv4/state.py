"""The state that tokens leave for the tokens after them, in the operator."""

import jax.numpy as jnp

from rwkv_jax.models.rwkv4.parameters import TimeMixParams
from rwkv_jax.wkv4 import Wkv4State
from rwkv_jax.wkv4.signature import NOTHING


def initial_wkv(params: TimeMixParams, batch: int) -> Wkv4State:
    """The state of `wkv4` before the first token: no sums, and no largest weight."""
    shape = (batch, params.time_decay.size)
    return Wkv4State(
        num=jnp.zeros(shape, jnp.float32),
        den=jnp.zeros(shape, jnp.float32),
        log_max=jnp.full(shape, NOTHING, jnp.float32),
    )
