"""The tokens of a call of WKV4 in groups, through which scans go side by side.

Groups are [B, n, L], and states [B, S, C], where a row that is one sequence has S = 1. Each sequence
and each chunk begins with a group.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Marks, Packing, Sequences
from rwkv_jax._operator.saved import CHUNK, chunks
from rwkv_jax._packing import by_chunk, segments
from rwkv_jax.wkv4.reference import add
from rwkv_jax.wkv4.summary import SUMMARY

UNROLLED = 8
"""The tokens of a group where the scan through it is no loop."""


class Groups:
    """Where tokens of rows [B, T] are in groups.

    unrolled: whether the scan through a group is no loop. On a GPU each iteration of a loop would
      cost several launches of kernels, while a CPU would take seconds to compile it without one.
    length: L.
    per_chunk: the groups of a chunk.
    valid: whether each token is no padding [B or 1, n, L, 1], None if all are.
    starts: whether each token starts a segment [B, n, L, 1], None if none does.
    opens, closes: whether each group is the first or the last of a sequence [B or 1, n, 1].
    """

    def __init__(self, unrolled: bool, tokens: int, packing: Packing) -> None:
        self.unrolled, self._tokens = unrolled, tokens
        length = min(tokens, CHUNK)
        self.length = min(length, UNROLLED) if unrolled else length
        self.per_chunk = -(-length // self.length)
        self.valid = self.starts = self._sequences = None
        first = chunks(tokens) * lax.broadcasted_iota(jnp.int32, (1, 2), 1)
        owner = jnp.zeros((1, chunks(tokens)), jnp.int32)
        if isinstance(packing, Sequences):
            self._sequences = by_chunk.chunks(packing.offsets, tokens)
            first, owner = self._sequences.layout.first, self._sequences.layout.owner
            marks = jnp.moveaxis(self._sequences.marks, 0, 1)[..., None]
            self.valid = self._grouped(marks, self.per_chunk, segments.PADDING) != segments.PADDING
        elif isinstance(packing, Marks):
            marks = self.cut(packing.marks[..., None], segments.PADDING)
            self.valid, self.starts = marks != segments.PADDING, marks == segments.STARTS
        elif tokens % (self.length * self.per_chunk):
            self.valid = self.cut(jnp.ones((1, tokens, 1), bool))
        self._owner = jnp.repeat(owner, self.per_chunk, axis=1)
        self._first, self._last = first[:, :-1] * self.per_chunk, first[:, 1:] * self.per_chunk - 1
        self.count = self._owner.shape[1]
        number = lax.broadcasted_iota(jnp.int32, self._owner.shape, 1)
        self.opens, self.closes = (
            (number == _of(x, self._owner))[..., None] for x in (self._first, self._last)
        )

    def _grouped(self, x: Array, groups: int, fill: Any) -> Array:
        """[B, M, ...] of tokens one after another as so many groups for each M."""
        missing = [(0, 0)] * x.ndim
        missing[2] = 0, groups * self.length - x.shape[2]
        x = jnp.pad(x, missing, constant_values=fill) if missing[2][1] else x
        return x.reshape(len(x), x.shape[1] * groups, self.length, *x.shape[3:])

    def cut(self, x: Array, fill: Any = 0) -> Array:
        """Tokens [B, T, ...] as those of groups [B, n, L, ...]."""
        if self._sequences is None:
            return self._grouped(x[:, None], chunks(self._tokens) * self.per_chunk, fill)
        return self._grouped(_of(x, jnp.moveaxis(self._sequences.tokens, 0, 1)), self.per_chunk, fill)

    def join(self, results: Any) -> Any:
        """The results of a scan [B, T, C]."""
        if self.unrolled:
            # Without a barrier XLA would compute each of the tokens in a kernel of its own.
            results = lax.optimization_barrier(results)
            results = jax.tree.map(lambda *xs: jnp.stack(xs), *results)
        return jax.tree.map(self._join, results)

    def _join(self, x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(len(x), -1, x.shape[3])
        if self._sequences is None:
            return x[:, : self._tokens]
        chunk, offset = self._sequences.place
        x = _of(x, chunk * (self.per_chunk * self.length) + offset)
        return jnp.where(self._sequences.there[..., None], x, jnp.zeros_like(x))

    def of_groups(self, x: Any) -> Any:
        """Of sequences [B, S, C] those of each group."""
        return jax.tree.map(lambda x: _of(x, self._owner), x)

    def at_first(self, x: Any) -> Any:
        """Of groups [B, n, C] the first one of each sequence."""
        return jax.tree.map(lambda x: _of(x, self._first), x)

    def at_last(self, x: Any) -> Any:
        return jax.tree.map(lambda x: _of(x, self._last), x)

    def or_given(self, x: Arrays, given: Arrays) -> Arrays:
        """`x` of sequences with tokens, and what stands for the others."""
        if self._sequences is None:
            return x
        tokens = jnp.diff(self._sequences.layout.offsets)[..., None]
        return jax.tree.map(lambda x, y: jnp.where(tokens > 0, x, y), x, given)

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        carry: Any,
        tokens: Any,
        *results: Any,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """`lax.scan` of `step(carry, token, ...)` through the tokens of groups [B, n, L, C] and the
        results of other scans."""

        def at(i: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 2, False), tokens)

        numbers = range(self.length)
        if not self.unrolled:
            return lax.scan(
                lambda carry, x: step(carry, at(x[0]), *x[1:]),
                carry,
                (lax.iota(jnp.int32, self.length), *results),
                reverse=reverse,
            )
        traced_once, found = jax.jit(step), [None] * self.length
        for i in reversed(numbers) if reverse else numbers:
            carry, found[i] = traced_once(carry, at(i), *[x[i] for x in results])
        return carry, found


def _of(x: Array, index: Array) -> Array:
    """`x[b, index[b]]` in each row b."""
    index = jnp.broadcast_to(index, (len(x), *index.shape[1:]))
    row = lax.broadcasted_iota(jnp.int32, index.shape, 0)
    return x.at[row, index].get(mode="clip")


def states_between(
    log_decay: Array, added: Arrays, given: Arrays, opens: Array, *, reverse: bool = False
) -> Arrays:
    """The states before each group [B, n, C], from the log decay over its tokens, the state after
    them from nothing, and the states that are given to groups that open a sequence."""
    if opens.shape[1] == 1:
        return given
    reset = {"log_decay": jnp.full_like(log_decay, -jnp.inf), **add(given, log_decay, added)}
    runs = {"log_decay": log_decay, **added}
    runs = jax.tree.map(lambda x, y: jnp.where(opens, x, y), reset, runs)
    after = lax.associative_scan(SUMMARY.combine, runs, reverse=reverse, axis=1)
    return {
        part: jnp.where(opens, given[part], jnp.roll(after[part], -1 if reverse else 1, axis=1))
        for part in given
    }
