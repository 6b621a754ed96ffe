"""States of WKV4 before many runs of tokens, which are computed side by side.

What a run of tokens does to a state is again a state, the one after these tokens from nothing, and
a decay. So runs are taken in groups: the groups become longer runs, the states before these follow
in the same way, and a walk through all groups at the same time gives the states before each run.
The cotangents of the sums are decayed sums themselves, from the last token to the first, and are
walked through in reverse.

Each run has the axes [B, n, 1], each state [B, n, C]. Groups have one axis more, [B, n, L, 1].
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK, Arrays
from rwkv_jax.wkv4.reference import add
from rwkv_jax.wkv4.signature import NOTHING

LENGTH = 8
"""Runs in a group, where the walk through it is not a loop."""

SLOPES = {"num": "num_slope", "den": "den_slope"}
"""Further parts that a state may have: the derivatives of its sums by the log decay of a token."""

PLACE = "place"
"""A further part that a state may have: the number of the token with the first largest weight, or 0
if that is the weight of the state before the tokens that the state has gone through."""


class Runs(NamedTuple):
    """What runs of tokens do to a state.

    ages: how many tokens each has, without padding, by which the state before it decays
      [B or 1, n, 1] in float32.
    starts: whether nothing is left of the state before it [B, n, 1], None if all of it stays.
    added: the state after its tokens from nothing.
    """

    ages: Array
    starts: Array | None
    added: Arrays


ItemFn: TypeAlias = Callable[[Any], Any]
"""`item(i)`: of each group what belongs to the run i, sliced out of arrays."""

RunFn: TypeAlias = Callable[[Any], Runs]
"""`run(item)`: the runs that items stand for [B, n, 1]."""

VisitFn: TypeAlias = Callable[[Any, Arrays], tuple[Any, Any]]
"""`visit(item, state)`: what is kept of a run of each group, from the state before it, and what is
added up over the runs of a group."""


class Kept(NamedTuple):
    """What is kept of the runs of groups: arrays [L, B, n, ...], or a list with one tree of arrays
    [B, n, ...] for each i."""

    runs: Any

    def item(self, i: Any) -> Any:
        if isinstance(self.runs, list):
            return self.runs[i]
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 0, False), self.runs)

    def written(self) -> "Kept":
        """The same, but XLA computes all of it in one kernel, before anything reads it."""
        return Kept(lax.optimization_barrier(self.runs))

    def flat(self, count: int) -> Any:
        """Of so many runs [B, count, ...]."""
        if isinstance(self.runs, list):
            stacked = jax.tree.map(lambda *xs: jnp.stack(xs, axis=2), *self.runs)
        else:
            stacked = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), self.runs)

        def joined(x: Array) -> Array:
            batch, groups, length, *rest = x.shape
            return x.reshape(batch, groups * length, *rest)[:, :count]

        return jax.tree.map(joined, stacked)


def grouped(x: Array, length: int) -> Array:
    """[B, T, ...] as [B, n, length, ...], filled up with zeros: runs that change nothing."""
    batch, count, *rest = x.shape
    groups = -(-count // length)
    missing = groups * length - count
    if missing:
        x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * len(rest))
    return x.reshape(batch, groups, length, *rest)


class Walk(NamedTuple):
    """A way through groups of runs.

    log_decay: of one token [B, C].
    unrolled: whether a walk is no loop. On a GPU each iteration of a loop would cost several
      launches of kernels, while a CPU would take seconds to compile it without a loop.
    reverse: from the last run to the first.
    """

    log_decay: Array
    unrolled: bool
    reverse: bool = False

    def length(self, count: int) -> int:
        """How many of so many runs are in a group."""
        return min(LENGTH if self.unrolled else CHUNK, count)

    def through(
        self, item: ItemFn, run: RunFn, length: int, states: Arrays, visit: VisitFn, sums: Any
    ) -> tuple[Arrays, Any, Kept]:
        """Of groups of a length the states after them, from the states before them, the sums, which
        start with `sums`, and what is kept of their runs."""

        def step(carry: tuple[Arrays, Any], x: Any) -> tuple[tuple[Arrays, Any], Any]:
            state, sums = carry
            ages, starts, added = run(x)
            kept, more = visit(x, state)
            state = self.after(left(state, starts), ages, added)
            return (state, jax.tree.map(jnp.add, sums, more)), kept

        if not self.unrolled:
            (states, sums), kept = lax.scan(
                lambda carry, i: step(carry, item(i)),
                (states, sums),
                lax.iota(jnp.int32, length),
                reverse=self.reverse,
            )
            return states, sums, Kept(kept)
        carry, found = (states, sums), [None] * length
        traced_once = jax.jit(step)
        for i in reversed(range(length)) if self.reverse else range(length):
            carry, found[i] = traced_once(carry, item(i))
        states, sums = carry
        return states, sums, Kept(found)

    def after(self, state: Arrays, ages: Array, added: Arrays) -> Arrays:
        """The states after runs."""
        log_decay = ages * self.log_decay[:, None]
        after = add(state, log_decay, added)
        if set(SLOPES.values()) <= state.keys():
            slopes = {part: state[slope] + ages * state[part] for part, slope in SLOPES.items()}
            unchanged = added | {part: jnp.zeros_like(x) for part, x in slopes.items()}
            slopes = add(state | slopes, log_decay, unchanged)
            after |= {slope: slopes[part] for part, slope in SLOPES.items()}
        if PLACE in state:
            stays = state["log_max"] + log_decay >= added["log_max"]
            after[PLACE] = jnp.where(stays, state[PLACE], added[PLACE])
        return after

    def runs(
        self, item: ItemFn, run: RunFn, ages: Array, starts: Array | None, like: Array
    ) -> Runs:
        """The groups as runs, from the ages and starts of their runs [B, n, L, 1]. `like` is any
        array [B, n, C]."""
        parts = run(item(0)).added.items()
        empty = {part: nothing(part, jnp.zeros_like(like, x.dtype)) for part, x in parts}
        added, _, _ = self.through(item, run, ages.shape[2], empty, lambda x, state: ({}, {}), {})
        any_start = None if starts is None else jnp.any(starts, axis=2)
        # Without a barrier XLA computes the runs anew for each of the longer runs.
        return lax.optimization_barrier(Runs(jnp.sum(ages, axis=2), any_start, added))

    def before(self, runs: Runs, state: Arrays) -> Arrays:
        """The states before each run, from the one [B, C] before all."""
        count = runs.ages.shape[1]
        # A walk that is twice as long is one in place of the two or three of groups of groups.
        length = count if count <= 2 * LENGTH else self.length(count)
        groups = jax.tree.map(lambda x: grouped(x, length), runs)
        states = jax.tree.map(lambda x: x[:, None], state)
        if count > length:
            like = groups.added["num"][:, :, 0]
            longer = self.runs(picker(groups), _run, groups.ages, groups.starts, like)
            states = self.before(longer, state)
        return self.inside(groups, states, count)

    def inside(self, groups: Runs, states: Arrays, count: int) -> Arrays:
        """The states before each of so many runs, from those before their groups."""
        length = groups.ages.shape[2]
        _, _, found = self.through(
            picker(groups), _run, length, states, lambda x, state: (state, {}), {}
        )
        return lax.optimization_barrier(found.written().flat(count))


class Apart(NamedTuple):
    """Tokens of rows [B, T, ...] as groups that may begin with any token, `start` [B, n], which no
    array has to hold."""

    x: Array
    start: Array

    def item(self, i: Any) -> Array:
        batch, tokens = self.x.shape[:2]
        first = lax.iota(jnp.int32, batch)[:, None] * tokens
        return numbered(self.x, first + jnp.minimum(self.start + i, tokens - 1))


def numbered(x: Array, number: Array) -> Array:
    """Of rows [B, T, ...] the tokens with these numbers, which count through all rows."""
    rows = x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
    return rows.at[number].get(mode="promise_in_bounds", wrap_negative_indices=False)


def sliced(x: Array) -> Kept:
    """What is known of the runs of groups [B, n, L, ...], in an array for each i. Kernels read
    these faster than they read slices of `x`."""
    return Kept(lax.optimization_barrier([x[:, :, i] for i in range(x.shape[2])]))


def picker(groups: Any) -> ItemFn:
    """Slices of arrays [B, n, L, ...], and items of `Apart` and `Kept`."""

    def is_leaf(x: Any) -> bool:
        return isinstance(x, Apart | Kept)

    def one(i: Any, x: Any) -> Array:
        return x.item(i) if is_leaf(x) else lax.dynamic_index_in_dim(x, i, 2, keepdims=False)

    def item(i: Any) -> Any:
        return jax.tree.map(functools.partial(one, i), groups, is_leaf=is_leaf)

    return item


def _run(x: Runs) -> Runs:
    log_max = jnp.where(x.ages > 0, x.added["log_max"], NOTHING)
    return x._replace(added=x.added | {"log_max": log_max})


def left(state: Arrays, starts: Array | None) -> Arrays:
    """What is left of the states before runs."""
    if starts is None:
        return state
    return {part: jnp.where(starts, nothing(part, x), x) for part, x in state.items()}


def nothing(part: str, x: Array) -> Array:
    """A part of states like `x` before any token."""
    return jnp.full_like(x, NOTHING if part == "log_max" else 0)
