"""The tokens of a call of WKV4 in groups that walks go through, and what walks from the first token
to the last one find.

Groups are [B, n, L], and states are [B, C], or [B, S, C] where a row consists of sequences.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Marks, Options, Packing, Sequences
from rwkv_jax._operator.saved import CHUNK
from rwkv_jax._packing import by_chunk, segments
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4.signature import NOTHING
from rwkv_jax.wkv4.walk import SLOPES, Kept, Runs, VisitFn, Walk, grouped, left, picker


class Token(NamedTuple):
    """One token of each group: how many it is [B or 1, n], 0 or 1, whether a segment starts with
    it, and its key and value [B, n, C]."""

    age: Array
    starts: Array | None
    k: Array
    v: Array


class Read(NamedTuple):
    """`y` of a token of each group, a, and the exponent that a is relative to [B, n, C]."""

    y: Array
    a: Array
    largest: Array


class Tokens:
    """The tokens of a call, in groups [B, n, L] of so many tokens each. Each row has one state."""

    def __init__(self, options: Options, unrolled: bool, inputs: Arrays, packing: Packing) -> None:
        log_decay, self.pull_back = jax.vjp(
            lambda w: unbounded_log_decay(w, options.decay), inputs["w"]
        )
        self.walk = Walk(log_decay, unrolled)
        self.lay_out(inputs["k"].shape[1], packing)
        if self.marks is None:
            self.ages = jnp.ones((1, self.count), jnp.float32)
        else:
            self.ages = (self.marks != segments.PADDING).astype(jnp.float32)
        k, v = self.cut(inputs["k"]), self.cut(inputs["v"])
        self._k, self._u = k, inputs["u"].astype(jnp.float32)[:, None]
        tokens = Token(self.ages, self.starts, k, v)
        self.groups = jax.tree.map(lambda x: grouped(x, self.length), tokens)

    def lay_out(self, count: int, packing: Packing) -> None:
        """Finds where tokens are: the marks of the tokens of groups, if they have any, and where
        segments start among them, the number of tokens, those of a group and the groups of a
        chunk."""
        self.marks = packing.marks if isinstance(packing, Marks) else None
        self.starts = None if self.marks is None else self.marks == segments.STARTS
        self.count, self.length = count, self.walk.length(count)
        self.per_chunk = max(CHUNK // self.length, 1)

    def cut(self, x: Array) -> Array:
        """The tokens of groups, one after another, from those of a call [B, T, C]."""
        return x

    def join(self, x: Array) -> Array:
        """The inverse of `cut`, with zeros for padding."""
        return segments.cleared(self.marks, [x])[0]

    def at_starts(self, x: Any) -> Any:
        """Of arrays of groups [B, n, C] what belongs to the first tokens of states."""
        return jax.tree.map(lambda x: x[:, 0], x)

    def at_ends(self, x: Any) -> Any:
        """Of arrays of groups [B, n, C] what belongs to the last tokens of states."""
        return jax.tree.map(lambda x: x[:, -1], x)

    def of_groups(self, x: Array) -> Array:
        """What belongs to states as what belongs to groups [B, n or 1, C]."""
        return x[:, None]

    def or_given(self, x: Arrays, given: Arrays) -> Arrays:
        """What was given of states without tokens, and `x` of all others."""
        return x

    def total(self, x: Array) -> Array:
        """The sum of what belongs to the states of a row [B, C]."""
        return x

    def states(self, walk: Walk, runs: Callable[[], Runs], given: Arrays) -> Arrays:
        """The states before each group on a walk, from the given ones, which the walk starts
        with."""
        if self.length == self.count:
            return jax.tree.map(self.of_groups, given)
        return walk.before(runs(), given)

    def inputs(self, token: Token) -> Arrays:
        """The inputs of a token in float32, as those of one that weighs nothing where it is
        padding."""
        there = token.age[..., None] > 0
        return {
            "u": self._u,
            "k": jnp.where(there, token.k.astype(jnp.float32), NOTHING),
            "v": jnp.where(there, token.v.astype(jnp.float32), 0.0),
        }

    def _run(self, token: Token) -> Runs:
        inputs = self.inputs(token)
        added = {"num": inputs["v"], "den": token.age[..., None], "log_max": inputs["k"]}
        return Runs(token.age, token.starts, added)

    def through(self, starts: Arrays, visit: VisitFn) -> tuple[Arrays, Any, Kept]:
        """Walk through the groups from the states before them, and visit each token with the state
        that it reads."""

        def of_token(token: Token, state: Arrays) -> tuple[Any, Any]:
            return visit(token, left(state, token.starts))

        return self.walk.through(picker(self.groups), self._run, self.length, starts, of_token, {})

    def runs(self) -> Runs:
        """The groups as runs."""
        ages, starts, k, _ = self.groups
        return self.walk.runs(picker(self.groups), self._run, ages, starts, k[:, :, 0])

    def before_groups(self, state: Arrays) -> Arrays:
        """The states before each group, from the ones that were given."""
        return self.states(self.walk, self.runs, state)

    def saved(self, starts: Arrays) -> Arrays:
        """The states before each chunk, from those before each group."""
        return jax.tree.map(lambda x: x[:, :: self.per_chunk], starts)

    def from_chunks(self, saved: Arrays) -> Arrays:
        """The states before each group, from those before each chunk."""
        groups = -(-self.count // self.length)
        if groups == saved["num"].shape[1]:
            return saved
        several = jax.tree.map(lambda x: grouped(x, self.per_chunk), self.runs())
        return self.walk.inside(several, saved, groups)

    def read(self, starts: Arrays, dy: Array) -> tuple[Arrays, Kept]:
        """The final states, and `Read` of each token, from the states before each group and the
        cotangents of `y`."""

        def visit(item: tuple[Token, Array], state: Arrays) -> tuple[Read, Any]:
            token, dy = item
            inputs, state = self.inputs(token), left(state, token.starts)
            own = inputs["u"] + inputs["k"]
            largest = jnp.maximum(state["log_max"], own)
            before, now = jnp.exp(state["log_max"] - largest), jnp.exp(own - largest)
            scale = 1.0 / (before * state["den"] + now)
            y = (before * state["num"] + now * inputs["v"]) * scale
            return Read(y, dy.astype(jnp.float32) * scale, largest), {}

        groups = picker((self.groups, grouped(dy, self.length)))
        ends, _, read = self.walk.through(
            groups, lambda item: self._run(item[0]), self.length, starts, visit, {}
        )
        return self.at_ends(ends), read.written()

    def shared(self, starts: Arrays, read: Kept, after: Arrays) -> tuple[Array, Array]:
        """The gradients of u and of the log decay [B, C], from the states before each group and the
        cotangents of the sums after it."""
        given = picker(self.groups)

        def visit(item: tuple[Token, Read], state: Arrays) -> tuple[Any, Arrays]:
            token, read = item
            inputs, state = self.inputs(token), left(state, token.starts)
            now = jnp.exp((inputs["u"] + inputs["k"]) - read.largest) * read.a
            before = jnp.exp(state["log_max"] - read.largest) * read.a
            dw = before * (state["num_slope"] - read.y * state["den_slope"])
            return {}, {"u": now * (inputs["v"] - read.y), "w": dw}

        zeros = jnp.zeros_like(starts["num"])
        ends, sums, _ = self.walk.through(
            lambda i: (given(i), read.item(i)),
            lambda item: self._run(item[0]),
            self.length,
            starts | dict.fromkeys(SLOPES.values(), zeros),
            visit,
            {"u": zeros, "w": zeros},
        )
        ends, sums = lax.optimization_barrier((ends, sums))
        later = ends["num_slope"] * after["num"] + ends["den_slope"] * after["den"]
        dw = sums["w"] + jnp.exp(ends["log_max"] + after["log_max"]) * later
        return jnp.sum(sums["u"], axis=1), jnp.sum(dw, axis=1)

    def first_largest(self, log_max: Array) -> tuple[Array, Array]:
        """Which is the first of the largest weights after all tokens [B, C], where 0 is that of the
        state before them and t + 1 that of token t, and by how many tokens it has decayed.

        It is one comparison of all exponents. Comparing them with the largest would fail where the
        compiler computes an exponent twice and rounds it differently."""
        upto = jnp.cumsum(self.ages, axis=1)
        ages = jnp.concatenate([upto[:, -1:], upto[:, -1:] - upto], axis=1)
        x = jnp.concatenate([log_max[:, None], self._k.astype(jnp.float32)], axis=1)
        x += ages[..., None] * self.walk.log_decay[:, None]
        if self.marks is not None:
            own = segments.numbers(self.marks)
            own = jnp.pad(own, ((0, 0), (1, 0)))
            there = jnp.pad(self.ages > 0, ((0, 0), (1, 0)), constant_values=True)
            x = jnp.where((there & (own == own[:, -1:]))[..., None], x, -jnp.inf)
        place = lax.argmax(x, 1, jnp.int32)
        ages = jnp.broadcast_to(ages, (len(x), ages.shape[1]))
        return place, jnp.take_along_axis(ages, place, axis=1)


class TokensOfSequences(Tokens):
    """The tokens of sequences, each of which begins with a group and has a state of its own
    [B, S, C]."""

    def lay_out(self, count: int, packing: Packing) -> None:
        assert isinstance(packing, Sequences)
        self._chunks = by_chunk.chunks(packing.offsets, count)
        layout = self._chunks.layout
        self.length = self.walk.length(layout.length)
        self.per_chunk = -(-layout.length // self.length)
        self.marks, self.starts = self._rows(self._chunks.marks, segments.PADDING), None
        self.count = self.marks.shape[1]
        self._lengths = jnp.diff(layout.offsets)
        # The groups with the first and with the last token of each sequence, and the sequence of
        # each group.
        self._first = layout.first[:, :-1] * self.per_chunk
        self._last = self._first + -(-self._lengths // self.length) - 1
        self._owner = jnp.repeat(layout.owner, self.per_chunk, axis=1)
        number = lax.broadcasted_iota(jnp.int32, self._owner.shape, 1)
        begins, ends = (self._of(x, self._owner) == number for x in (self._first, self._last))
        self._begins, self._ends = begins, ends

    def _rows(self, x: Array, padding: Any) -> Array:
        """[N, B, length of chunks, ...] as [B, tokens of groups, ...]."""
        return by_chunk.one_after_another(x, self.per_chunk * self.length, padding)

    def _of(self, x: Array, number: Array) -> Array:
        """Of [B, M, ...] those with the numbers [B, N]."""
        number = jnp.clip(number, 0, x.shape[1] - 1)
        return x[lax.broadcasted_iota(jnp.int32, number.shape, 0), number]

    def cut(self, x: Array) -> Array:
        return self._rows(self._chunks.cut(x), 0)

    def join(self, x: Array) -> Array:
        x = x.reshape(len(x), -1, self.per_chunk * self.length, *x.shape[2:])
        return self._chunks.join(jnp.moveaxis(x, 1, 0))

    def at_starts(self, x: Any) -> Any:
        return jax.tree.map(lambda x: self._of(x, self._first), x)

    def at_ends(self, x: Any) -> Any:
        return jax.tree.map(lambda x: self._of(x, self._last), x)

    def of_groups(self, x: Array) -> Array:
        return self._of(x, self._owner)

    def or_given(self, x: Arrays, given: Arrays) -> Arrays:
        there = (self._lengths > 0)[..., None]
        return jax.tree.map(lambda x, y: jnp.where(there, x, y), x, given)

    def total(self, x: Array) -> Array:
        return jnp.sum(jnp.where((self._lengths > 0)[..., None], x, 0.0), axis=1)

    def states(self, walk: Walk, runs: Callable[[], Runs], given: Arrays) -> Arrays:
        """What the first group of a sequence on the walk adds includes the given state."""
        opens = self._ends if walk.reverse else self._begins
        of_groups = jax.tree.map(self.of_groups, given)
        ages, _, added = runs()
        first = walk.after(of_groups, ages[..., None], added)

        def chosen(x: Array, y: Array) -> Array:
            return jnp.where(opens[..., None], x, y)

        added = jax.tree.map(chosen, first, added)
        nothing = {
            part: jnp.full_like(x[:, 0], NOTHING if part == "log_max" else 0.0)
            for part, x in given.items()
        }
        return jax.tree.map(chosen, of_groups, walk.before(Runs(ages, opens, added), nothing))

    def first_largest(self, log_max: Array) -> tuple[Array, Array]:
        log_decay, lengths = self.walk.log_decay[:, None], self._lengths[..., None]
        begin = self._first[..., None] * self.length
        number = lax.iota(jnp.int32, self.count)[None, :, None]
        owner = jnp.repeat(self._owner, self.length, axis=1)
        after = self._of(begin + lengths, owner) - 1 - number
        x = self._k.astype(jnp.float32) + after.astype(jnp.float32) * log_decay
        # A sequence begins with a chunk, and chunks are fewer than groups.
        chunk = self.per_chunk * self.length
        x = grouped(jnp.where((self.ages > 0)[..., None], x, -jnp.inf), chunk)
        place = lax.argmax(x, 2, jnp.int32) + number[:, ::chunk]

        def first(x: Any, y: Any) -> Any:
            """The first largest of two runs of chunks: its exponent, its place, and whether a
            sequence begins in a run."""
            later = y[2] | (y[0] > x[0])
            return jnp.where(later, y[0], x[0]), jnp.where(later, y[1], x[1]), x[2] | y[2]

        begins = self._begins[:, :: self.per_chunk, None]
        found = jnp.max(x, axis=2), place, jnp.broadcast_to(begins, place.shape)
        found = lax.associative_scan(first, found, axis=1)
        last = self._last // self.per_chunk
        largest, place = (self._of(x, last) for x in found[:2])
        of_given = log_max + lengths.astype(jnp.float32) * log_decay >= largest
        age = jnp.where(of_given, lengths, begin + lengths - 1 - place)
        return jnp.where(of_given, 0, place + 1), age.astype(jnp.float32)


def tokens_of(options: Options, unrolled: bool, inputs: Arrays, packing: Packing) -> Tokens:
    """The tokens of a call, in groups as a walk with or without a loop needs them."""
    kind = TokensOfSequences if isinstance(packing, Sequences) else Tokens
    return kind(options, unrolled, inputs, packing)
