"""Several sequences in one row of a batch: where each starts, and which tokens are none.

A segment is a run of tokens with the same id; 0 is padding. The first segment of a row goes on from
the initial state, every other one starts anew, and the final state is that after the last one.
Padding changes no state, its `y` is 0, and so are its gradients.

Implementations get a mark for each token, next to their other operands: GOES_ON, STARTS or ABSENT.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import UInt8

GOES_ON, STARTS, ABSENT = 0, 1, 2

Marks: TypeAlias = UInt8[Array, "B T"]

WORD = 16
"""Tokens whose marks native kernels find in one number."""


def checked(op: str, ids: Any, shape: tuple[int, ...]) -> Array:
    if not isinstance(ids, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: segment_ids is a {type(ids).__name__}; accepted is a JAX or numpy array"
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{op}: segment_ids is {ids.dtype}; accepted are integers")
    if ids.shape != shape:
        raise ValueError(f"{op}: segment_ids has shape {ids.shape}; accepted is [B, T] = {shape}")
    return jnp.asarray(ids)


def marks(ids: Array, before: Array | None = None, seen: Array | bool = False) -> Marks:
    """The mark of each token [B, T]. Of rows that go on from elsewhere, `before` [B] is the id
    there, and `seen` [B] whether any token before these is one of a segment."""
    there = ids != 0
    if ids.shape[1] == 0:
        return there.astype(jnp.uint8)
    before = ids[:, 0] if before is None else before
    changes = ids != jnp.concatenate([before[:, None], ids[:, :-1]], axis=1)
    first = jnp.argmax(there, axis=1, keepdims=True)
    later = (lax.broadcasted_iota(jnp.int32, ids.shape, 1) > first) | jnp.reshape(seen, (-1, 1))
    marks = jnp.where(changes & later, jnp.uint8(STARTS), jnp.uint8(GOES_ON))
    return jnp.where(there, marks, jnp.uint8(ABSENT))


def over_devices(ids: Array, axis: Any) -> Marks:
    """Those of the tokens of this device, of which each has consecutive ones along `axis`."""
    last = jnp.sum(ids[:, -1:], axis=1)
    lasts, any_there = lax.all_gather((last, jnp.any(ids != 0, axis=1)), axis)
    index = lax.axis_index(axis)
    earlier = jnp.arange(len(lasts)) < index
    before = lax.dynamic_index_in_dim(lasts, jnp.maximum(index - 1, 0), keepdims=False)
    return marks(ids, before, jnp.any(any_there & earlier[:, None], axis=0))


def segments(marks: Array) -> Array:
    """The segment that each token belongs to, counted from 0 at the first token [B, L]."""
    return jnp.cumsum(marks == STARTS, axis=1, dtype=jnp.int32)


def there(marks: Array, like: Array) -> Array:
    """Whether each token is one of a segment, with axes of size 1 for the others of `like`."""
    return jnp.expand_dims(marks != ABSENT, tuple(range(2, like.ndim)))


def cleared(marks: Array | None, xs: Sequence[Array]) -> list[Array]:
    """Arrays [B, T, ...] with zeros for padding, whatever is there."""
    if marks is None:
        return list(xs)
    return [jnp.where(there(marks, x), x, jnp.zeros_like(x)) for x in xs]


def total(marks: Array, log_decay: Array) -> Array:
    """The log decay [B, ...] of what was before the first token over all of them, from that of each
    [B, T, ...]: -inf where a segment starts among them."""
    (log_decay,) = cleared(marks, [log_decay])
    starts = jnp.expand_dims(jnp.any(marks == STARTS, axis=1), tuple(range(1, log_decay.ndim - 1)))
    return jnp.where(starts, -jnp.inf, jnp.sum(log_decay, axis=1))


def operand(marks: Array | None) -> tuple[Array, ...]:
    """The last operand of a native kernel, if there is one: [B, M] of uint32, a word for 16 tokens
    and whole chunks of them, with a bit for each token that starts a segment, and above these one
    for each that is padding."""
    if marks is None:
        return ()
    batch, tokens = marks.shape
    missing = -tokens % (4 * WORD)
    marks = jnp.pad(marks, ((0, 0), (0, missing)), constant_values=ABSENT)
    marks = marks.reshape(batch, (tokens + missing) // WORD, WORD)
    place = lax.broadcasted_iota(jnp.uint32, marks.shape, 2)
    bits = ((marks == STARTS).astype(jnp.uint32) << place) | (
        (marks == ABSENT).astype(jnp.uint32) << (place + WORD)
    )
    return (jnp.sum(bits, axis=2, dtype=jnp.uint32),)
