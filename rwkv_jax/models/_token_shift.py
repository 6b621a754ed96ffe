"""The token shift: a layer mixes each token with the token before it.

The state of a token shift is the last token that the layer has seen, [B, C].
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, Int32

from rwkv_jax._packing import segments
from rwkv_jax.layers import norm_shift_mix
from rwkv_jax.layers.norm_shift_mix import NOTHING, STATE, TOKEN, shifted
from rwkv_jax.models._normalisation import Norm, layer_norm, normalised


def of_previous(mix: Float[Array, " C"]) -> Float[Array, " C"]:
    """The share of the previous token in each channel, in float32, from that of the present one."""
    return 1 - mix.astype(jnp.float32)


def initial_shift(x: Float[Array, "B *T C"]) -> Float[Array, "B C"]:
    """The state before the first token: zeros, distributed over devices as a token of `x` is. `x`
    may have no tokens."""
    return jnp.zeros_like(x[:, :1].sum(1) if x.ndim == 3 else x)


class Shifted(NamedTuple):
    """The input, for its other uses, its mixes with the token before, and the next state."""

    x: Array
    mixed: tuple[Array, ...]
    state: Array


def shift_and_mix(
    norm: Norm | None,
    mixes: tuple[Float[Array, " C"], ...],
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    segment_ids: Int[Array, " B *T"] | None,
    implementation: str | None,
) -> Shifted:
    """Each of the mixes of a token, normalised by `norm` if there is one, with the token before it.

    The next state is a copy, so that donating it deletes neither `x` nor `state`. Compiled programs
    do not copy.
    """
    state = initial_shift(x) if state is None else state.astype(x.dtype)
    if x.ndim == 2:
        n = x if norm is None else layer_norm(norm, x)
        mixed = tuple(n + (state - n) * mix.astype(x.dtype)[None] for mix in mixes)
        last = _Last(n, None if segment_ids is None else segment_ids[:, None] != 0)
        return Shifted(x, mixed, _next(state, last))
    origin = None if segment_ids is None else _origin(segment_ids)
    last = _last(x, segment_ids)
    if norm is None:
        before = shifted(x, state, origin)
        mixed = tuple(x + (before - x) * mix.astype(x.dtype)[None, None] for mix in mixes)
        return Shifted(x, mixed, _next(state, last))
    weight, bias, *stacked = (p.astype(jnp.float32) for p in (*norm, *mixes))
    x, mixed, moments = norm_shift_mix(
        *(x, state, weight, bias, jnp.stack(stacked)), origin=origin, implementation=implementation
    )
    if last is not None and (of_last := _last(moments, segment_ids)) is not None:
        last = last._replace(x=normalised(norm, last.x, of_last.x))
    return Shifted(x, mixed, _next(state, last))


class _Last(NamedTuple):
    """What the last token of each row that is no padding has [B, C], and whether there is one."""

    x: Array
    present: Array | None


def _last(x: Float[Array, "B T C"], segment_ids: Int[Array, "B T"] | None) -> _Last | None:
    tokens = x.shape[1]
    if tokens == 0:
        return None
    if segment_ids is None:
        return _Last(x[:, -1], None)
    index = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    last = jnp.max(jnp.where(segment_ids != 0, index, -1), axis=1)[:, None, None]
    found = jnp.take_along_axis(x, jnp.maximum(last, 0), axis=1)[:, 0]
    return _Last(found, last[:, 0] >= 0)


def _next(state: Float[Array, "B C"], last: _Last | None) -> Float[Array, "B C"]:
    if last is None:
        return jnp.copy(state)
    if last.present is None:
        return jnp.copy(last.x)
    return jnp.where(last.present, last.x, state)


def _origin(segment_ids: Int[Array, "B T"]) -> Int32[Array, "B T"]:
    """What stands before each token: the first segment goes on from the state, the others start
    from zeros, and padding may stand before the first one."""
    starts = jnp.where(segments.marks(segment_ids) == segments.STARTS, NOTHING, TOKEN)
    index = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    is_first = index == segments.first(segment_ids != 0)
    return jnp.where(is_first, STATE, starts).astype(jnp.int32)
