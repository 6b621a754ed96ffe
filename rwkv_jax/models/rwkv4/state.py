"""The state that tokens leave for the tokens after them."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from rwkv_jax.models import _trees
from rwkv_jax.models._trees import Params, State
from rwkv_jax.models.rwkv4.parameters import TimeMixParams
from rwkv_jax.wkv4 import Wkv4State
from rwkv_jax.wkv4.signature import NOTHING


def initial_state(params: Params, batch: int, dtype: DTypeLike = jnp.float32) -> State:
    """The state before the first token. `dtype` is the dtype of the activations."""
    return _trees.initial_state(initial_wkv, params, batch, dtype)


def initial_wkv(params: TimeMixParams, batch: int) -> Wkv4State:
    """The state of `wkv4` before the first token: no sums, and no largest weight."""
    shape = (batch, params.time_decay.size)
    return Wkv4State(
        num=jnp.zeros(shape, jnp.float32),
        den=jnp.zeros(shape, jnp.float32),
        log_max=jnp.full(shape, NOTHING, jnp.float32),
    )
