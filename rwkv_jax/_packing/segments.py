"""Segments: documents that share the rows of a batch.

A segment is a run of tokens with the same id; the id 0 is padding. The first segment of a row
continues from the initial state, every other segment starts from the state before any token, and
the final state is the state after the last segment. Padding changes no state; its `y` and its
gradients are 0.

Implementations get a mark for each token: CONTINUES, STARTS or PADDING.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator import check

CONTINUES, STARTS, PADDING = 0, 1, 2


def checked(op: str, ids: Any, *shape: int) -> Array:
    """Integers [B, T], or [B] for one token of each row."""
    found = check.integers(op, "segment_ids", ids)
    if ids.shape != shape:
        axes = "[B, T]" if len(shape) == 2 else "[B]"
        raise ValueError(f"{op}: segment_ids has shape {ids.shape}; accepted is {axes} = {shape}")
    return found


def marks(ids: Array, before: Array | None = None, seen: Array | bool = False) -> Array:
    """The mark of each token [B, T]. Where rows continue those of another device, `before` [B] is
    the last id there, and `seen` [B] says whether any earlier token belongs to a segment."""
    there = ids != 0
    if ids.shape[1] == 0:
        return there.astype(jnp.uint8)
    # Where the compiler distributes the tokens, it exchanges one for a pad.
    earlier = lax.pad(ids, jnp.zeros((), ids.dtype), ((0, 0, 0), (1, -1, 0)))
    if before is not None:
        earlier = earlier.at[:, 0].set(before)
    changes = ids != earlier
    index = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    later = (index > first(there)) | jnp.reshape(seen, (-1, 1))
    marks = jnp.where(changes & later, jnp.uint8(STARTS), jnp.uint8(CONTINUES))
    return jnp.where(there, marks, jnp.uint8(PADDING))


def first(there: Array) -> Array:
    """The index of the first token that belongs to a segment [B, 1]: T where none does."""
    index = lax.broadcasted_iota(jnp.int32, there.shape, 1)
    return jnp.min(jnp.where(there, index, there.shape[1]), axis=1, keepdims=True)


def over_devices(ids: Array, axis: Any) -> Array:
    """The marks of the tokens of this device, inside a `shard_map` whose devices have consecutive
    tokens along `axis`."""
    last = jnp.sum(ids[:, -1:], axis=1)
    lasts, any_there = lax.all_gather((last, jnp.any(ids != 0, axis=1)), axis)
    index = lax.axis_index(axis)
    earlier = jnp.arange(len(lasts)) < index
    before = lax.dynamic_index_in_dim(lasts, jnp.maximum(index - 1, 0), keepdims=False)
    return marks(ids, before, jnp.any(any_there & earlier[:, None], axis=0))


def numbers(marks: Array) -> Array:
    """The number of the segment that each token belongs to, from 0 at the first token [B, L]."""
    return jnp.cumsum(marks == STARTS, axis=1, dtype=jnp.int32)


def there(marks: Array, like: Array) -> Array:
    """Whether each token belongs to a segment [B, T], with axes of size 1 to the rank of `like`."""
    return jnp.expand_dims(marks != PADDING, tuple(range(2, like.ndim)))


def cleared(marks: Array | None, xs: Sequence[Array]) -> list[Array]:
    """Arrays [B, T, ...] with zeros in place of padding."""
    if marks is None:
        return list(xs)
    return [jnp.where(there(marks, x), x, jnp.zeros_like(x)) for x in xs]


def total(marks: Array, log_decay: Array) -> Array:
    """The log decay [B, ...] over all tokens of the state before them, from the log decay of each
    token [B, T, ...]. It is -inf where a segment starts, since nothing older remains."""
    (log_decay,) = cleared(marks, [log_decay])
    starts = jnp.expand_dims(jnp.any(marks == STARTS, axis=1), tuple(range(1, log_decay.ndim - 1)))
    return jnp.where(starts, -jnp.inf, jnp.sum(log_decay, axis=1))
