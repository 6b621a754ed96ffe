"""The state that tokens leave for the tokens after them."""

import jax.numpy as jnp
from jax.typing import DTypeLike

from rwkv_jax import _typing
from rwkv_jax.models import _trees
from rwkv_jax.models._trees import Params, State
from rwkv_jax.models.rwkv5.parameters import TimeMixParams


def initial_state(params: Params, batch: int, dtype: DTypeLike = jnp.float32) -> State:
    """The state before the first token: zeros. `dtype` is the dtype of the activations."""
    return _trees.initial_state(initial_wkv, params, batch, dtype)


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv5` before the first token: zeros."""
    heads = len(params.time_decay)
    head_size = len(params.receptance.weight) // heads
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)
