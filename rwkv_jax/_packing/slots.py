"""Slots: a call that continues some rows of a pool of states [P, ...].

`slots` says which rows: [B], or [S] for sequences in a single row. A row or sequence with a slot
below 0 is not active: its `y` is 0 and it changes nothing. Where slots are known when a call is
traced, a slot that the pool does not have and a slot that is there twice are errors. Where they are
not, a row with a slot that the pool does not have is not active, and of several rows with the same
slot the last one is kept.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, core

from rwkv_jax._operator import check
from rwkv_jax._operator.call import Arrays


def checked(op: str, slots: Any, batch: tuple[int, ...], size: int) -> Array:
    check.array(op, "slots", slots)
    if slots.dtype != jnp.int32:
        raise TypeError(f"{op}: slots is {slots.dtype}; accepted is int32")
    if slots.shape != batch:
        raise ValueError(
            f"{op}: slots has shape {slots.shape}; accepted is one for each state, here {batch}"
        )
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


class Pool(NamedTuple):
    """The parts of a pool of states, [P, ...] each, and the slots of a call."""

    parts: Arrays
    slots: Array

    def rows(self) -> Arrays:
        """The states [B, ...]; zeros for rows that are not active."""
        mode = {"mode": "fill", "fill_value": 0, "wrap_negative_indices": False}
        return {part: x.at[self.slots].get(**mode) for part, x in self.parts.items()}

    def active(self) -> Array:
        """Which rows are active [B]."""
        size = len(next(iter(self.parts.values())))
        return (self.slots >= 0) & (self.slots < size)

    def after(self, y: Array, states: Arrays, active: Array) -> tuple[Array, Arrays]:
        """`y` with zeros where it is not `active` [B] or [B, T], and the pool with these states, in
        place where it is donated."""
        y = jnp.where(active.reshape(*active.shape, *[1] * (y.ndim - active.ndim)), y, 0)
        kept, mode = _last_of_each(self.slots), {"mode": "drop", "wrap_negative_indices": False}
        return y, {p: x.at[kept].set(states[p], **mode) for p, x in self.parts.items()}


def _last_of_each(slots: Array) -> Array:
    """-1 in place of each slot that a later row has too."""
    same = slots[:, None] == slots[None, :]
    return jnp.where(jnp.triu(same, 1).any(axis=1), -1, slots)
