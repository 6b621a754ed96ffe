"""The forward pass of the model."""

import functools
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models import _recomputation
from rwkv_jax.models._linear import embed, logits
from rwkv_jax.models._normalisation import layer_norm
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._token_shift import check_segment_ids
from rwkv_jax.models.rwkv7.channel_mixing import mix_channels
from rwkv_jax.models.rwkv7.parameters import BlockParams, Params
from rwkv_jax.models.rwkv7.state import BlockState, State, initial_block
from rwkv_jax.models.rwkv7.time_mixing import Options, Wkv, mix_tokens
from rwkv_jax.wkv7 import wkv7


def features(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    recompute: Recompute | None = None,
    wkv: Wkv = wkv7,
) -> tuple[Float[Array, "B *T C"], State]:
    """What `params.head` makes logits of: the normalised output of the last block, for a sequence
    [B, T] of tokens or for one token each, [B].

    `rwkv_jax.losses` computes a loss from it without the logits of all tokens at once.

    Args:
      params: the parameters, in either form: as `init` or as `stacked` gives them.
      tokens: integers below the size of the vocabulary.
      state: the state after the tokens before `tokens`, in the form of `params`; `initial_state` if
        None.
      segment_ids: which tokens of a row are one document, with 0 for padding; for sequences only.
        The first document goes on from `state`, every other one starts anew, and the next state is
        the one after the last document.
      dtype: the dtype of the activations.
      implementation: the implementation of `wkv7`.
      layers: the implementation of the functions of `rwkv_jax.layers`. Where tokens of a sequence
        are distributed over devices, give "xla", which the compiler partitions.
      recompute: what the backward pass computes again rather than keeps: "cheap", all but the
        products and the results of `wkv7`; "blocks", everything but the activations between blocks;
        or None, what costs nothing to speak of.
      wkv: the function that mixes sequences: `wkv7`, or `sharding.shard(wkv7, ...)`.

    Returns:
      The features [B, T, C] or [B, C] in `dtype`, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with one token each; or `state` has
        another form than `params`.
    """
    check_segment_ids("rwkv7", segment_ids, tokens.shape)
    x = embed(params.emb, tokens, dtype)
    block = functools.partial(_block, Options(segment_ids, implementation, layers, wkv))
    recomputed = functools.partial(_recomputation.recomputed, block, recompute)
    if isinstance(params.blocks, Stacked):
        if not isinstance(state, Stacked | None):
            raise ValueError("rwkv7: state is a tuple; accepted with stacked blocks is Stacked")
        x, next_state = _scan(recomputed(), recomputed(scanned=True), params.blocks, x, state)
    else:
        if isinstance(state, Stacked):
            raise ValueError("rwkv7: state is Stacked; accepted with a tuple of blocks is a tuple")
        x, next_state = _in_turn(recomputed(), params.blocks, x, state)
    return layer_norm(params.ln_out, x), next_state


_Block: TypeAlias = Callable[
    [BlockParams, Array, Array | None, BlockState | None], tuple[Array, Array, BlockState]
]


def _in_turn(
    block: _Block, blocks: tuple[BlockParams, ...], x: Array, state: tuple[BlockState, ...] | None
) -> tuple[Array, State]:
    """The activations after all blocks, and the next state."""
    v_first = None
    next_state = []
    for p, s in zip(blocks, state or (None,) * len(blocks), strict=True):
        x, v_first, after = block(p, x, v_first, s)
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
    x, v_first, first = block(blocks.first, x, None, state and state.first)
    if blocks.rest is None:
        return x, Stacked(first, None)
    constant = lax.stop_gradient(v_first)

    def step(
        carry: tuple[Array, Array], of_block: tuple[BlockParams, BlockState | None]
    ) -> tuple[tuple[Array, Array], BlockState]:
        x, passed = carry
        p, s = of_block
        x, passed, after = body(p, x, _with_gradient(constant, passed), s)
        return (x, passed), after

    (x, _), rest = lax.scan(step, (x, v_first), (blocks.rest, state and state.rest))
    return x, Stacked(first, rest)


@jax.custom_vjp
def _with_gradient(constant: Array, carried: Array) -> Array:
    """`constant`, which equals `carried`, with the gradient of `carried`.

    A backward pass keeps a value that a scan carries once for each block, and a constant once.
    """
    return constant


_with_gradient.defvjp(lambda constant, carried: (constant, None), lambda _, dx: (None, dx))


def _block(
    options: Options,
    p: BlockParams,
    x: Float[Array, "B *T C"],
    v_first: Float[Array, "B *T C"] | None,
    s: BlockState | None,
) -> tuple[Array, Array, BlockState]:
    """The activations after a block, the value of the first block, and the next state."""
    if s is None:
        s = initial_block(p, len(x), x.dtype)
    if p.ln0 is not None:
        x = layer_norm(p.ln0, x)
    x, dx, att, v_first = mix_tokens(p.att, p.ln1, x, s.att, v_first, options)
    x, dx, ffn = mix_channels(p.ffn, p.ln2, x + dx, s.ffn, options.segment_ids, options.layers)
    return x + dx, v_first, BlockState(att, ffn)


def apply(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    recompute: Recompute | None = None,
    wkv: Wkv = wkv7,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """Logits of the next token after each token of a sequence [B, T], or after one token each, [B].

    The arguments and errors are those of `features`.

    Returns:
      Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.
    """
    x, next_state = features(
        *(params, tokens, state),
        segment_ids=segment_ids,
        dtype=dtype,
        implementation=implementation,
        layers=layers,
        recompute=recompute,
        wkv=wkv,
    )
    return logits(params.head, x), next_state
