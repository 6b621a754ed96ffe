"""The short causal convolution of linear-attention layers."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from rwkv_jax._operator import check
from rwkv_jax._packing import segments
from rwkv_jax._typing import Operand


def short_convolution(
    x: Float[Operand, "B T D"],
    weight: Float[Operand, "D 1 W"],
    state: Float[Operand, "B before D"] | None = None,
    *,
    segment_ids: Int[Operand, "B T"] | None = None,
) -> tuple[Float[Array, "B T D"], Float[Array, "B before D"]]:
    """A causal convolution of each channel along the tokens, with the SiLU activation:

        y[t] = silu(sum of weight[:, 0, W - 1 - i] * x[t - i] over i = 0 ... W - 1)

    in float32, rounded once to the dtype of `x`. The state is the last W - 1 tokens: x[-1], the
    token before the first one, is `state[:, -1]`.

    Args:
      x: tokens, float32, bfloat16 or float16.
      weight: the filter of each channel, [D, 1, W] as in PyTorch.
      state: [B, W - 1, D], converted to the dtype of `x`; zeros if None.
      segment_ids: integers [B, T], the same for consecutive tokens that belong together; 0 is
        padding. The first segment continues from `state`, and every other one from zeros. A token
        reads no token of another segment. The result at padding has no meaning.

    Returns:
      y, and the next state: the last W - 1 tokens of the last segment that is not padding.

    Raises:
      TypeError, ValueError: an argument has another type, shape or dtype.
    """
    x, weight, state = _checked(x, weight, state)
    rows, tokens, channels = x.shape
    before = weight.shape[-1] - 1
    if state is None:
        # Distributed over devices as a token of `x` is.
        zeros = jnp.zeros_like(x[:, :1].sum(1))[:, None]
        state = jnp.broadcast_to(zeros, (rows, before, channels))
    state = state.astype(x.dtype)
    ids = None
    if segment_ids is not None:
        ids = segments.checked("short_convolution", segment_ids, rows, tokens)
    if ids is None or tokens == 0:
        extended = jnp.concatenate([state, x], axis=1)
        return _convolve(extended, weight, None), extended[:, tokens:]
    marks = segments.marks(ids)
    (x,) = segments.cleared(marks, [x])
    extended, last = _extended(x, state, marks)
    reached = _reached(marks, before)
    at = last[:, None, None] + 1 + jnp.arange(before)[None, :, None]
    after = jnp.take_along_axis(extended, at, axis=1)
    # The next state holds the token i before the last one at W - 2 - i.
    kept = jnp.take_along_axis(reached[:before], jnp.maximum(last, 0)[None, :, None], axis=2)
    after = jnp.where(kept[::-1, :, 0].T[..., None], after, jnp.zeros_like(after))
    return _convolve(extended, weight, reached), after


def _extended(x: Array, state: Array, marks: Array) -> tuple[Array, Array]:
    """`x` behind W - 1 more tokens, with the state right before the first token that is no padding,
    and the index of the last token of each row that is none, -1 where all are."""
    tokens, before = x.shape[1], state.shape[1]
    present = marks != segments.PADDING
    index = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    last = jnp.max(jnp.where(present, index, -1), axis=1)
    first = lax.argmax(present, 1, jnp.int32)[:, None, None]
    extended = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (before, 0, 0), (0, 0, 0)))
    at = lax.broadcasted_iota(jnp.int32, (x.shape[0], before + tokens, 1), 1)
    for i in range(before):
        extended = jnp.where(at == first + i, state[:, i, None], extended)
    return extended, last


def _reached(marks: Array, before: int) -> Array:
    """Whether a token may read the token i before it, [W, B, T]: no segment starts between."""
    starts = marks == segments.STARTS
    reached = [jnp.ones_like(starts)]
    for i in range(before):
        shifted = lax.pad(starts, jnp.zeros((), bool), ((0, 0, 0), (i, -i, 0)))
        reached.append(reached[-1] & ~shifted)
    return jnp.stack(reached)


@jax.checkpoint
def _convolve(extended: Array, weight: Array, reached: Array | None) -> Array:
    """The sums over W tokens, each if it is reached. The backward pass computes them again, since
    it would keep several arrays of float32 otherwise."""
    taps = weight.shape[-1]
    tokens = extended.shape[1] - (taps - 1)
    terms = []
    for i in range(taps):
        x = lax.slice_in_dim(extended, taps - 1 - i, taps - 1 - i + tokens, axis=1)
        if reached is not None:
            x = jnp.where(reached[i][..., None], x, jnp.zeros_like(x))
        factor = weight[:, 0, taps - 1 - i].astype(jnp.float32)[None, None]
        terms.append(factor * x.astype(jnp.float32))
    return jax.nn.silu(sum(terms[1:], terms[0])).astype(extended.dtype)


def _checked(
    x: Operand, weight: Operand, state: Operand | None
) -> tuple[Array, Array, Array | None]:
    op, given = "short_convolution", {"x": x, "weight": weight, "state": state}
    for name, array in given.items():
        if name != "state" or array is not None:
            check.array(op, name, array)
            check.dtype(op, name, array)
    if x.ndim != 3:
        raise ValueError(f"{op}: x has shape {x.shape}; accepted is [B, T, D]")
    rows, _, channels = x.shape
    if weight.ndim != 3 or weight.shape[:2] != (channels, 1) or weight.shape[2] == 0:
        raise ValueError(
            f"{op}: weight has shape {weight.shape}; accepted is [D, 1, W] with D = {channels} and "
            "W of at least 1"
        )
    accepted = (rows, weight.shape[2] - 1, channels)
    if state is not None and state.shape != accepted:
        raise ValueError(
            f"{op}: state has shape {state.shape}; accepted is [B, W - 1, D] = {accepted}"
        )
    return jnp.asarray(x), jnp.asarray(weight), None if state is None else jnp.asarray(state)
