"""The tokens of rows in groups of a few tokens, which scans go through side by side.

Groups are [B, n, L]. States are [B, S, C], with S = 1 where a row is one sequence. Each sequence
begins with a group, and a chunk is a whole number of groups.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK, Arrays, Marks, Packing, Sequences, chunks
from rwkv_jax._packing import by_chunk
from rwkv_jax._packing.segments import PADDING, STARTS
from rwkv_jax.wkv4.reference import add

UNROLLED = 8
"""L where the scan through a group is no loop."""


class Groups:
    """Where the tokens of rows [B, T] are in groups.

    per_chunk: the groups of a chunk.
    valid: whether each token is no padding [B or 1, n, L, 1]; None if all are.
    starts: whether a segment starts with each token [B, n, L, 1]; None if none does.
    opens, closes: whether each group is the first or the last of a sequence [B or 1, n, 1].
    opens_chunk: whether each group is the first of a chunk [1, n, 1].
    """

    def __init__(self, unrolled: bool, tokens: int, packing: Packing) -> None:
        self._unrolled, self._tokens, chunk = unrolled, tokens, min(tokens, CHUNK)
        self._length = min(chunk, UNROLLED) if unrolled else chunk
        self.per_chunk = -(-chunk // self._length)
        self._chunks = self.valid = self.starts = None
        bounds = chunks(tokens) * lax.broadcasted_iota(jnp.int32, (1, 2), 1)
        owner = jnp.zeros((1, chunks(tokens)), jnp.int32)
        if isinstance(packing, Sequences):
            self._chunks = by_chunk.chunks(packing.offsets, tokens)
            bounds, owner = self._chunks.layout.first, self._chunks.layout.owner
        self._owner = jnp.repeat(owner, self.per_chunk, axis=1)
        self._first, self._end = bounds[:, :-1] * self.per_chunk, bounds[:, 1:] * self.per_chunk
        if self._chunks is not None:
            self.valid = self._grouped(self._chunks.marks[..., None], PADDING) != PADDING
        elif isinstance(packing, Marks):
            marks = self.cut(packing.marks[..., None], PADDING)
            self.valid, self.starts = marks != PADDING, marks == STARTS
        elif tokens % (self._length * self.per_chunk):
            self.valid = self.cut(jnp.ones((1, tokens, 1), bool))
        number = lax.broadcasted_iota(jnp.int32, self._owner.shape, 1)
        self.opens = (number == _of(self._first, self._owner))[..., None]
        self.closes = (number == _of(self._end, self._owner) - 1)[..., None]
        self.opens_chunk = (number % self.per_chunk == 0)[..., None]

    def _grouped(self, x: Array, fill: Any) -> Array:
        """Parts of rows [N, B, M, ...], one after another, as groups [B, n, L, ...]."""
        parts, batch, tokens, *rest = x.shape
        count, missing = self._owner.shape[1], [(0, 0)] * x.ndim
        missing[2] = 0, count * self._length // parts - tokens
        x = jnp.pad(jnp.moveaxis(x, 0, 1), missing, constant_values=fill)
        return x.reshape(batch, count, self._length, *rest)

    def cut(self, x: Array, fill: Any = 0) -> Array:
        """Tokens [B, T, ...] as those of groups [B, n, L, ...]."""
        return self._grouped(x[None] if self._chunks is None else self._chunks.cut(x), fill)

    def join(self, results: Any) -> Any:
        """The results of a scan through groups as those of tokens [B, T, ...]."""
        if self._unrolled:
            # Without a barrier XLA computes each of them in a kernel of its own, from the start.
            results = lax.optimization_barrier(results)
            results = jax.tree.map(lambda *xs: jnp.stack(xs), *results)

        def of_row(x: Array) -> Array:
            x = jnp.moveaxis(x, 0, 2)
            batch, count, length, channels = x.shape
            if self._chunks is None:
                return x.reshape(batch, count * length, channels)[:, : self._tokens]
            chunk = count // self.per_chunk, self.per_chunk * length
            return self._chunks.join(jnp.moveaxis(x.reshape(batch, *chunk, channels), 1, 0))

        return jax.tree.map(of_row, results)

    def of(self, x: Any) -> Any:
        """Of sequences [B, S, C] the one that each group belongs to."""
        return jax.tree.map(lambda x: _of(x, self._owner), x)

    def at_first(self, x: Any) -> Any:
        """Of groups [B, n, C] the first one of each sequence."""
        return jax.tree.map(lambda x: _of(x, self._first), x)

    def at_last(self, x: Any) -> Any:
        """Of groups [B, n, C] the last one of each sequence."""
        return jax.tree.map(lambda x: _of(x, self._end - 1), x)

    def or_given(self, x: Arrays, given: Arrays) -> Arrays:
        """`x`, except for sequences without tokens."""
        return jax.tree.map(
            lambda x, y: jnp.where((self._end > self._first)[..., None], x, y), x, given
        )

    def scan(
        self,
        step: Callable[..., tuple[Any, Any]],
        carry: Any,
        tokens: Any,
        *results: Any,
        reverse: bool = False,
    ) -> tuple[Any, Any]:
        """`lax.scan` of `step(carry, token, ...)` through tokens [B, n, L, ...] and the results of
        other scans. On a GPU each iteration of a loop would cost several launches of kernels, while
        a CPU would take seconds to compile it without a loop."""

        def at(i: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, 2, False), tokens)

        numbers = range(self._length)
        if not self._unrolled:
            xs = lax.iota(jnp.int32, self._length), *results
            return lax.scan(lambda c, x: step(c, at(x[0]), *x[1:]), carry, xs, reverse=reverse)
        traced_once, new = jax.jit(step), [None] * self._length
        for i in reversed(numbers) if reverse else numbers:
            carry, new[i] = traced_once(carry, at(i), *(x[i] for x in results))
        return carry, new


def _of(x: Array, number: Array) -> Array:
    """Of [B, M, ...] those with the numbers [B or 1, N]."""
    number = jnp.broadcast_to(number, (len(x), number.shape[1]))
    return x.at[lax.broadcasted_iota(jnp.int32, number.shape, 0), number].get(mode="clip")


def states_before(
    runs: tuple[Array, Arrays], given: Arrays, opens: Array, *, reverse: bool = False
) -> Arrays:
    """The states before each group [B, n, C], from the log decay over all tokens of each group, the
    state after them from nothing, and the states that are given to groups that open a sequence."""
    log_decay, added = runs
    from_given = {"log_decay": jnp.full_like(log_decay, -jnp.inf), **joined(given, *runs)}
    elements = {"log_decay": log_decay, **added}
    elements = jax.tree.map(lambda x, y: jnp.where(opens, x, y), from_given, elements)

    def combined(first: Arrays, second: Arrays) -> Arrays:
        log_decay = second["log_decay"]
        state = joined(first, log_decay, {part: second[part] for part in given})
        return {"log_decay": first["log_decay"] + log_decay, **state}

    after = lax.associative_scan(combined, elements, reverse=reverse, axis=1)
    step = -1 if reverse else 1
    return {p: jnp.where(opens, x, jnp.roll(after[p], step, axis=1)) for p, x in given.items()}


def joined(state: Arrays, log_decay: Array, added: Arrays) -> Arrays:
    """`add`, but of a state that is not finite, too, nothing is left by a log decay of -inf."""
    after = add(state, log_decay, added)
    return {part: jnp.where(log_decay == -jnp.inf, added[part], x) for part, x in after.items()}
