"""The forward pass of a model: embedding, blocks in turn or in a scan, normalisation and head."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models import _recomputation
from rwkv_jax.models._linear import embed, logits
from rwkv_jax.models._normalisation import layer_norm
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._token_shift import check_segment_ids
from rwkv_jax.models._trees import BlockParams, BlockState, InitialWkv, Params, State, initial_block
from rwkv_jax.models._wkv import Options


class Generation(NamedTuple):
    """What the models of a generation consist of.

    `mix_tokens` takes the parameters of a time mixing, a normalisation, its input, its state, what
    the first block has for all others (the value in RWKV-7; otherwise None) and `Options`. It
    returns the input, for its other uses, the output, the next state, and what the first block has.

    `mix_channels` takes the parameters of a channel mixing, a normalisation, its input, its state,
    the segments and the implementation of layer functions. It returns the input, the output and the
    next state.
    """

    name: str
    mix_tokens: Callable[..., tuple[Array, Array, Any, Any]]
    mix_channels: Callable[..., tuple[Array, Array, Array]]
    initial_wkv: InitialWkv


def features(
    generation: Generation,
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None,
    options: Options,
    dtype: DTypeLike,
    recompute: Recompute | None,
) -> tuple[Float[Array, "B *T C"], State]:
    """What `params.head` makes logits of, and the next state; `rwkv7.features` describes both."""
    name = generation.name
    check_segment_ids(name, options.segment_ids, tokens.shape)
    x = embed(params.emb, tokens, dtype)
    block = functools.partial(_block, generation, options)
    recomputed = functools.partial(_recomputation.recomputed, block, recompute)
    if isinstance(params.blocks, Stacked):
        if not isinstance(state, Stacked | None):
            raise ValueError(f"{name}: state is a tuple; accepted with stacked blocks is Stacked")
        x, next_state = _scan(recomputed(), recomputed(scanned=True), params.blocks, x, state)
    else:
        if isinstance(state, Stacked):
            raise ValueError(
                f"{name}: state is Stacked; accepted with a tuple of blocks is a tuple"
            )
        x, next_state = _in_turn(recomputed(), params.blocks, x, state)
    return layer_norm(params.ln_out, x), next_state


def apply(
    generation: Generation,
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None,
    options: Options,
    dtype: DTypeLike,
    recompute: Recompute | None,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """The logits of the next token after each token, and the next state."""
    x, next_state = features(generation, params, tokens, state, options, dtype, recompute)
    return logits(params.head, x), next_state


_Block: TypeAlias = Callable[
    [BlockParams, Array, Any, BlockState | None], tuple[Array, Any, BlockState]
]


def _in_turn(
    block: _Block, blocks: tuple[BlockParams, ...], x: Array, state: tuple[BlockState, ...] | None
) -> tuple[Array, State]:
    """The activations after all blocks, and the next state."""
    of_first = None
    next_state = []
    for p, s in zip(blocks, state or (None,) * len(blocks), strict=True):
        x, of_first, after = block(p, x, of_first, s)
        next_state.append(after)
    return x, tuple(next_state)


def _scan(
    block: _Block,
    body: _Block,
    blocks: Stacked,
    x: Array,
    state: Stacked | None,
) -> tuple[Array, State]:
    """`_in_turn` with a scan over all blocks but the first, of which each is `body`."""
    x, of_first, first = block(blocks.first, x, None, state and state.first)
    if blocks.rest is None:
        return x, Stacked(first, None)
    constant = jax.tree.map(lax.stop_gradient, of_first)

    def step(
        carry: tuple[Array, Any], of_block: tuple[BlockParams, BlockState | None]
    ) -> tuple[tuple[Array, Any], BlockState]:
        x, passed = carry
        p, s = of_block
        x, passed, after = body(p, x, jax.tree.map(_with_gradient, constant, passed), s)
        return (x, passed), after

    (x, _), rest = lax.scan(step, (x, of_first), (blocks.rest, state and state.rest))
    return x, Stacked(first, rest)


@jax.custom_vjp
def _with_gradient(constant: Array, carried: Array) -> Array:
    """`constant`, which equals `carried`, with the gradient of `carried`.

    A backward pass keeps a value that a scan carries once for each block, and a constant once.
    """
    return constant


_with_gradient.defvjp(lambda constant, carried: (constant, None), lambda _, dx: (None, dx))


def _block(
    generation: Generation,
    options: Options,
    p: BlockParams,
    x: Float[Array, "B *T C"],
    of_first: Any,
    s: BlockState | None,
) -> tuple[Array, Any, BlockState]:
    """The activations after a block, what the first block has for all others, and the next
    state."""
    if s is None:
        s = initial_block(generation.initial_wkv, p, len(x), x.dtype)
    if p.ln0 is not None:
        x = layer_norm(p.ln0, x)
    x, dx, att, of_first = generation.mix_tokens(p.att, p.ln1, x, s.att, of_first, options)
    ids, layers = options.segment_ids, options.layers
    x, dx, ffn = generation.mix_channels(p.ffn, p.ln2, x + dx, s.ffn, ids, layers)
    return x + dx, of_first, BlockState(att, ffn)
