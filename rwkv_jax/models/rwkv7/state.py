"""The state that tokens leave for the tokens after them.

Every array of a state has a buffer of its own, so that a state can be donated.
"""

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from rwkv_jax import _typing
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models.rwkv7.parameters import BlockParams, Params, TimeMixParams


class TimeMixState(NamedTuple):
    """`shift` [B, C] is the last input of the time mixing, in the dtype of the activations, and
    `wkv` [B, H, V, K] the float32 state of `wkv7`."""

    shift: Array
    wkv: Array


class BlockState(NamedTuple):
    """`att` is the state of the time mixing, and `ffn` [B, C] the last input of the channel mixing,
    in the dtype of the activations."""

    att: TimeMixState
    ffn: Array


State: TypeAlias = tuple[BlockState, ...] | Stacked
"""The state of the model: one of each block, in the form that the parameters have."""


def initial_state(params: Params, batch: int, dtype: DTypeLike = jnp.float32) -> State:
    """The state before the first token: zeros. `dtype` is the dtype of the activations."""

    blocks = params.blocks
    if not isinstance(blocks, Stacked):
        return tuple(initial_block(p, batch, dtype) for p in blocks)
    first = initial_block(blocks.first, batch, dtype)
    if blocks.rest is None:
        return Stacked(first, None)
    count = len(blocks.rest.att.r_k)
    rest = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), first)
    return Stacked(first, rest)


def initial_block(params: BlockParams, batch: int, dtype: DTypeLike) -> BlockState:
    """The state of a block before the first token: zeros."""
    shape = (batch, params.att.r_k.size)
    att = TimeMixState(jnp.zeros(shape, dtype), initial_wkv(params.att, batch))
    return BlockState(att, jnp.zeros(shape, dtype))


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv7` before the first token: zeros."""
    heads, head_size = params.r_k.shape
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)
