"""The token shift: a layer mixes each token with the token before it.

The state of a token shift is the last token that the layer has seen, [B, C].
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt8

from rwkv_jax._packing import segments
from rwkv_jax._typing import Operand


def check_segment_ids(name: str, ids: Operand | None, shape: tuple[int, ...]) -> None:
    """Raise an error that names the function `name` unless `ids` are None or fit tokens of `shape`,
    [B, T] for sequences and [B] for a single token each."""
    if ids is None:
        return
    if len(shape) != 2:
        raise ValueError(f"{name}: segment_ids with one token a row; accepted is None")
    segments.checked(name, ids, *shape)


def initial_shift(x: Float[Array, "B *T C"]) -> Float[Array, "B C"]:
    """The state before the first token: zeros, distributed over devices as a token of `x` is. `x`
    may have no tokens."""
    return jnp.zeros_like(x[:, :1].sum(1) if x.ndim == 3 else x)


def token_shift(
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"],
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
    """The token before each token of `x`, and the next state.

    The next state is a copy, so that donating it deletes neither `x` nor `state`. Compiled programs
    do not copy.
    """
    state = state.astype(x.dtype)
    if x.ndim == 2:
        return state, jnp.copy(x)
    if x.shape[1] == 0:
        return x, jnp.copy(state)
    # Where the tokens are distributed over devices, the compiler finds that this exchanges one.
    before = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (1, -1, 0), (0, 0, 0)))
    before = lax.dynamic_update_slice_in_dim(before, state[:, None], 0, axis=1)
    if segment_ids is None:
        return before, jnp.copy(x[:, -1])
    return _shift_segments(x, before, state, segments.marks(segment_ids))


def _shift_segments(
    x: Float[Array, "B T C"],
    before: Float[Array, "B T C"],
    state: Float[Array, "B C"],
    marks: UInt8[Array, "B T"],
) -> tuple[Float[Array, "B T C"], Float[Array, "B C"]]:
    """`before` and the next state, corrected for segments: the first one goes on from `state`, the
    others start from zeros, and padding may stand before the first one and after the last one."""
    present, tokens = marks != segments.PADDING, x.shape[1]
    index = lax.broadcasted_iota(jnp.int32, marks.shape, 1)
    first = index == jnp.min(jnp.where(present, index, tokens), axis=1, keepdims=True)
    before = jnp.where(first[..., None], state[:, None], before)
    before = jnp.where((marks == segments.STARTS)[..., None], jnp.zeros_like(x), before)
    last = jnp.max(jnp.where(present, index, -1), axis=1)[:, None, None]
    after = jnp.take_along_axis(x, jnp.maximum(last, 0), axis=1)[:, 0]
    return before, jnp.where(last[:, 0] < 0, state, after)
