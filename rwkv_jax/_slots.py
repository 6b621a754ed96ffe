"""Rows of a pool of states [P, ...], of which a call continues some: `slots` [B] says which.

A slot below 0 is of a row that is not active: its `y` is 0 and it changes nothing. Where slots are
known when a call is traced, one that the pool does not have and one that is there twice are errors;
where they are not, a row with a slot that the pool does not have is not active, and of several rows
with one slot the last one is kept.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core


def checked(op: str, slots: Any, batch: tuple[int, ...], size: int) -> Array:
    if not isinstance(slots, jax.Array | np.ndarray):
        raise TypeError(
            f"{op}: slots is a {type(slots).__name__}; accepted is a JAX or numpy array"
        )
    if slots.dtype != jnp.int32:
        raise TypeError(f"{op}: slots is {slots.dtype}; accepted is int32")
    if slots.shape != batch:
        raise ValueError(f"{op}: slots has shape {slots.shape}; accepted is [B], here {batch}")
    if not isinstance(slots, core.Tracer):
        _check_values(op, np.asarray(slots), size)
    return jnp.asarray(slots)


def _check_values(op: str, slots: np.ndarray, size: int) -> None:
    used, times = np.unique(slots[slots >= 0], return_counts=True)
    if used.size and used[-1] >= size:
        raise ValueError(
            f"{op}: slots has {used[-1]} where the pool has {size} rows; accepted are numbers "
            "below that, and any below 0 for rows that are not active"
        )
    if (times > 1).any():
        raise ValueError(
            f"{op}: slots has {used[times > 1][0]} more than once; accepted are different rows"
        )


def rows_of(pool: Array, slots: Array) -> Array:
    """The states [B, ...]; zeros for rows that are not active."""
    return pool.at[slots].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def only_active(y: Array, slots: Array, size: int) -> Array:
    active = (slots >= 0) & (slots < size)
    return jnp.where(active.reshape(-1, *[1] * (y.ndim - 1)), y, jnp.zeros_like(y))


def last_of_each(slots: Array) -> Array:
    """-1 in place of each slot that a later row has too."""
    same = slots[:, None] == slots[None, :]
    return jnp.where(jnp.triu(same, 1).any(axis=1), -1, slots)


def replaced(pool: Array, slots: Array, rows: Array) -> Array:
    """The pool with these rows, of different slots, in place where it is donated."""
    return pool.at[slots].set(rows, mode="drop", wrap_negative_indices=False)
