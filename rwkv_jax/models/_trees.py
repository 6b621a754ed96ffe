"""The trees of parameters and of states that models of all generations have.

Every array of a state has a buffer of its own, so that a state can be donated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, overload

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from rwkv_jax.models import _stacking
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._stacking import Stacked


class BlockParams(NamedTuple):
    """The parameters of a block: three normalisations, and the `TimeMixParams` and
    `ChannelMixParams` of a generation. Only the first block has `ln0`, which normalises the
    embedding."""

    ln0: Norm | None
    ln1: Norm
    ln2: Norm
    att: Any
    ffn: Any


class Params(NamedTuple):
    """The parameters of the model. `stacked` gives the blocks their stacked form."""

    emb: Weight
    blocks: tuple[BlockParams, ...] | Stacked
    ln_out: Norm
    head: Weight


def first_block(params: Params) -> BlockParams:
    """The first block of parameters in either form."""
    blocks = params.blocks
    return blocks.first if isinstance(blocks, Stacked) else blocks[0]


def has_tables(params: Params) -> bool:
    """Whether blocks look up tables by token, as those of RWKV-7a (DeepEmbed) do."""
    return getattr(first_block(params).ffn, "s_emb", None) is not None


class TimeMixState(NamedTuple):
    """`shift` [B, C] is the last input of the time mixing, in the dtype of the activations, and
    `wkv` the float32 state of the operator: [B, H, V, K], or in RWKV-4 a `Wkv4State`."""

    shift: Array
    wkv: Any


class BlockState(NamedTuple):
    """`att` is the state of the time mixing, and `ffn` [B, C] the last input of the channel mixing,
    in the dtype of the activations."""

    att: TimeMixState
    ffn: Array


State: TypeAlias = tuple[BlockState, ...] | Stacked
"""The state of the model: one of each block, in the form that the parameters have."""

InitialWkv: TypeAlias = Callable[[Any, int], Any]
"""The state of an operator before the first token, from the parameters of a time mixing and the
number of rows."""


def initial_state(initial_wkv: InitialWkv, params: Params, batch: int, dtype: DTypeLike) -> State:
    """The state before the first token. `dtype` is the dtype of the activations."""
    blocks = params.blocks
    if not isinstance(blocks, Stacked):
        return tuple(initial_block(initial_wkv, p, batch, dtype) for p in blocks)
    first = initial_block(initial_wkv, blocks.first, batch, dtype)
    if blocks.rest is None:
        return Stacked(first, None)
    count = len(blocks.rest.ln1.weight)
    rest = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), first)
    return Stacked(first, rest)


def initial_block(
    initial_wkv: InitialWkv, params: BlockParams, batch: int, dtype: DTypeLike
) -> BlockState:
    """The state of a block before the first token."""
    shape = (batch, params.ln1.weight.size)
    att = TimeMixState(jnp.zeros(shape, dtype), initial_wkv(params.att, batch))
    return BlockState(att, jnp.zeros(shape, dtype))


@overload
def stacked(tree: Params) -> Params: ...
@overload
def stacked(tree: State) -> State: ...
def stacked(tree: Params | State) -> Params | State:
    """Parameters or a state in stacked form: `Stacked` in place of the tuple of blocks.

    The model then goes through its blocks in a `lax.scan`, so that the size of the compiled program
    and the time to compile it do not depend on the number of blocks. Results are the same. The
    state of the model has the form of its parameters.

    Gradients, and the moments of an optimizer, are trees with the form of the parameters. The names
    of arrays begin with `blocks.first.` and `blocks.rest.`; only `unstacked` gives official names.
    """
    if isinstance(tree, Params):
        return tree._replace(blocks=_stacking.stack(tree.blocks))
    return _stacking.stack(tree)


@overload
def unstacked(tree: Params) -> Params: ...
@overload
def unstacked(tree: State) -> State: ...
def unstacked(tree: Params | State) -> Params | State:
    """The inverse of `stacked`: a tuple of blocks."""
    if isinstance(tree, Params):
        return tree._replace(blocks=_stacking.unstack(tree.blocks))
    return _stacking.unstack(tree)
