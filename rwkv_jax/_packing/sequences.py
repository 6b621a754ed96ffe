"""Sequences of different lengths one after another in a row, each with a state of its own.

`cu_seqlens` [Z], with Z = S + 1 offsets, says where: the sequence s has the tokens from offset s to
offset s + 1. Offsets that only the device knows are clamped to the tokens there are, and so that
they never decrease.

The chunks of a row are counted from the start of each sequence, so that a sequence may end with a
chunk of fewer tokens; saved states are in this order.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core, lax

from rwkv_jax._operator import check
from rwkv_jax._operator.call import CHUNK


def checked(op: str, offsets: Any, batch: int, tokens: int) -> Array:
    check.array(op, "cu_seqlens", offsets)
    if offsets.dtype != jnp.int32:
        raise TypeError(f"{op}: cu_seqlens is {offsets.dtype}; accepted is int32")
    if offsets.ndim != 1 or offsets.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens has shape {offsets.shape}; accepted is [S + 1]")
    if batch != 1:
        raise ValueError(f"{op}: cu_seqlens with B = {batch}; accepted is B = 1, all in one row")
    if not isinstance(offsets, core.Tracer):
        _check_values(op, np.asarray(offsets), tokens)
    return jnp.asarray(offsets)


def _check_values(op: str, offsets: np.ndarray, tokens: int) -> None:
    accepted = f"accepted are numbers from 0 to T = {tokens} that do not decrease"
    if offsets[0] != 0:
        raise ValueError(f"{op}: cu_seqlens starts with {offsets[0]}; {accepted}")
    if (down := np.flatnonzero(np.diff(offsets) < 0)).size:
        low, high = offsets[down[0] + 1], offsets[down[0]]
        raise ValueError(f"{op}: cu_seqlens has {low} behind {high}; {accepted}")
    if offsets[-1] != tokens:
        raise ValueError(f"{op}: cu_seqlens ends with {offsets[-1]}; {accepted}")


def _clamped(offsets: Array, tokens: int) -> Array:
    return lax.cummax(jnp.clip(offsets, 0, tokens), axis=1)


def find(ends: Array, count: int) -> Array:
    """How many of the ends [B, S] are at or before each number below a count [B, count]."""
    numbers = lax.iota(jnp.int32, count)
    search = functools.partial(jnp.searchsorted, side="right", method="scan_unrolled")
    return jax.vmap(search, in_axes=(0, None))(ends, numbers).astype(jnp.int32)


def owners(offsets: Array, tokens: int) -> Array:
    """The sequence of each token of a row [T], or S for a token of no sequence."""
    sequences, offsets = len(offsets) - 1, _clamped(offsets[None], tokens)
    owner = find(offsets[:, 1:], tokens)[0]
    return jnp.where(lax.iota(jnp.int32, tokens) < offsets[0, 0], sequences, owner)


class Layout(NamedTuple):
    """Where sequences and their chunks are in rows of tokens.

    offsets: clamped [B, Z].
    length: the tokens of a chunk, CHUNK if nothing else is asked for; fewer if a row has fewer.
    first: the first chunk of each sequence, and the number of all chunks [B, Z].
    owner: the sequence of each chunk [B, N], where N is as many chunks as there can be.
    used: whether there is such a chunk [B, N].
    """

    offsets: Array
    length: int
    first: Array
    owner: Array
    used: Array


def chunks(offsets: Array, tokens: int, length: int = CHUNK) -> int:
    """As many chunks as there can be. So many states are saved of chunks with CHUNK tokens."""
    length = min(tokens, length)
    return (tokens + (offsets.shape[1] - 1) * (length - 1)) // length


def layout(offsets: Array, tokens: int, length: int = CHUNK) -> Layout:
    """The layout of rows [B] with so many tokens and with offsets [B, Z]."""
    sequences = offsets.shape[1] - 1
    length, most = min(tokens, length), chunks(offsets, tokens, length)
    offsets = _clamped(offsets, tokens)
    upto = jnp.cumsum(-(-jnp.diff(offsets) // length), axis=1, dtype=jnp.int32)
    owner = jnp.minimum(find(upto, most), sequences - 1)
    used = lax.broadcasted_iota(jnp.int32, owner.shape, 1) < upto[:, -1:]
    return Layout(offsets, length, jnp.pad(upto, ((0, 0), (1, 0))), owner, used)
