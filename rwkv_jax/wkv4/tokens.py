"""The tokens of a call of WKV4 in groups that walks go through, and what walks from the first token
to the last one find.

Groups are [B, n, L], and states are [B, C], or [B, S, C] where a row consists of sequences.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK, Arrays, Marks, Options, Packing, Sequences
from rwkv_jax._packing import by_chunk, segments, sequences
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4.signature import NOTHING
from rwkv_jax.wkv4.walk import (
    LENGTH,
    PLACE,
    SLOPES,
    Apart,
    Kept,
    Runs,
    VisitFn,
    Walk,
    grouped,
    left,
    nothing,
    numbered,
    picker,
    sliced,
)


class Token(NamedTuple):
    """One token of each group: whether it is no padding [B or 1, n, 1], its number in the row
    of groups from 1 on [1, n, 1], whether a segment starts with it [B, n, 1], and its key and
    value [B, n, C]."""

    there: Array
    place: Array
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
        # 0 tokens times a log decay of -inf, which resets a state, would be NaN.
        self.walk = Walk(jnp.maximum(log_decay, jnp.finfo(jnp.float32).min), unrolled)
        self.lay_out(inputs["k"].shape[1], packing)
        if self.marks is None:
            there = jnp.ones((1, self.count), bool)
        else:
            there = self.marks != segments.PADDING
        self.ages = there.astype(jnp.float32)
        self._u = inputs["u"].astype(jnp.float32)[:, None]
        places = lax.iota(jnp.int32, self.count)[None] + 1
        self.ages_of_groups = self.grouped(self.ages)
        self.starts_of_groups = None if self.starts is None else self.grouped(self.starts)
        self.groups = Token(
            self.sliced(self.grouped(there)),
            self.grouped(places),
            self.sliced(self.starts_of_groups),
            self.cut(inputs["k"]),
            self.cut(inputs["v"]),
        )

    def lay_out(self, count: int, packing: Packing) -> None:
        """Finds where tokens are: the marks of the tokens of groups, if they have any, and where
        segments start among them, the number of tokens, those of a group and the groups of a
        chunk."""
        self.marks = packing.marks if isinstance(packing, Marks) else None
        self.starts = None if self.marks is None else self.marks == segments.STARTS
        self.count, self.length = count, self.walk.length(count)
        self.per_chunk = max(CHUNK // self.length, 1)

    def cut(self, x: Array) -> Any:
        """The tokens of a call [B, T, C] for `picker`."""
        return grouped(x, self.length)

    def grouped(self, x: Array) -> Array:
        """What is known of tokens [B, T] as that of groups [B, n, L, 1]."""
        return grouped(x[..., None], self.length)

    def sliced(self, x: Array | None) -> Any:
        """What is known of the tokens of groups [B, n, L, 1] for `picker`. Without marks it is a
        constant, of which nothing is left in a compiled program."""
        if x is None or self.marks is None or not self.walk.unrolled:
            return x
        return sliced(x)

    def cleared(self, token: Token, x: Array) -> Array:
        """A result of a token of each group, with zeros for padding that `join` keeps."""
        return jnp.where(token.there, x, 0.0)

    def of_one_kernel(self) -> Token:
        """The groups for a walk that is best in a kernel of its own."""
        return self.groups

    def join(self, x: Array) -> Array:
        """The tokens of a call from those of groups, one after another."""
        return x

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
        return {
            "u": self._u,
            "k": jnp.where(token.there, token.k.astype(jnp.float32), NOTHING),
            "v": jnp.where(token.there, token.v.astype(jnp.float32), 0.0),
        }

    def _run(self, token: Token) -> Runs:
        inputs, age = self.inputs(token), token.there.astype(jnp.float32)
        added = {"num": inputs["v"], "den": age, "log_max": inputs["k"]}
        return Runs(age, token.starts, added)

    def _placed(self, token: Token) -> Runs:
        run = self._run(token)
        place = jnp.where(token.there, token.place, 0)
        return run._replace(added=run.added | {PLACE: place})

    def through(self, starts: Arrays, visit: VisitFn) -> tuple[Arrays, Any, Kept]:
        """Walk through the groups from the states before them, and visit each token with the state
        that it reads."""

        def of_token(token: Token, state: Arrays) -> tuple[Any, Any]:
            return visit(token, left(state, token.starts))

        return self.walk.through(picker(self.groups), self._run, self.length, starts, of_token, {})

    def runs(self, *, placed: bool = False) -> Runs:
        """The groups as runs, also with PLACE."""
        item, run = picker(self.groups), self._placed if placed else self._run
        return self.walk.runs(item, run, self.ages_of_groups, self.starts_of_groups, item(0).k)

    def before_groups(self, state: Arrays) -> Arrays:
        """The states before each group, from the ones that were given."""
        return self.states(self.walk, functools.partial(self.runs, placed=PLACE in state), state)

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

    def read(self, starts: Arrays, dy: Array) -> tuple[Arrays, Array, Kept]:
        """The final states, PLACE after all tokens, and `Read` of each token, from the states
        before each group and the cotangents of `y`."""

        def visit(item: tuple[Token, Array], state: Arrays) -> tuple[Read, Any]:
            token, dy = item
            inputs, state = self.inputs(token), left(state, token.starts)
            own = inputs["u"] + inputs["k"]
            largest = jnp.maximum(state["log_max"], own)
            before, now = jnp.exp(state["log_max"] - largest), jnp.exp(own - largest)
            scale = 1.0 / (before * state["den"] + now)
            y = (before * state["num"] + now * inputs["v"]) * scale
            dy = jnp.where(token.there, dy.astype(jnp.float32), 0.0)
            return Read(y, dy * scale, largest), {}

        groups = picker((self.groups, self.cut(dy)))
        starts = {PLACE: jnp.zeros_like(starts["num"], jnp.int32)} | starts
        ends, _, read = self.walk.through(
            groups, lambda item: self._placed(item[0]), self.length, starts, visit, {}
        )
        place = self.first_largest(ends.pop(PLACE))
        return self.at_ends(ends), place, read.written()

    def first_largest(self, places: Array) -> Array:
        """Which is the first of the largest weights after all tokens [B, C], from PLACE of each
        group alone. It is the last one that was larger than all before it."""
        return jnp.max(places, axis=1)

    def shared(self, starts: Arrays, read: Kept, after: Arrays) -> tuple[Array, Array]:
        """The gradients of u and of the log decay [B, C], from the states before each group and the
        cotangents of the sums after it."""
        given = picker(self.of_one_kernel())

        def visit(item: tuple[Token, Read], state: Arrays) -> tuple[Any, Arrays]:
            token, read = item
            inputs, state = self.inputs(token), left(state, token.starts)
            now = jnp.exp((inputs["u"] + inputs["k"]) - read.largest) * read.a
            before = jnp.exp(state["log_max"] - read.largest) * read.a
            dw = before * (state["num_slope"] - read.y * state["den_slope"])
            return {}, {"u": now * (inputs["v"] - read.y), "w": dw}

        zeros = jnp.zeros_like(starts["num"])
        starts = {part: x for part, x in starts.items() if part != PLACE}
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

    def since(self, place: Array) -> Array:
        """By how many tokens what has such a PLACE has decayed in the end [B, C]."""
        upto = jnp.cumsum(self.ages, axis=1)
        ages = jnp.concatenate([upto[:, -1:], upto[:, -1:] - upto], axis=1)
        ages = jnp.broadcast_to(ages, (len(place), ages.shape[1]))
        return jnp.take_along_axis(ages, place, axis=1)


class TokensOfSequences(Tokens):
    """The tokens of sequences, each of which begins with a group and has a state of its own
    [B, S, C]."""

    def lay_out(self, count: int, packing: Packing) -> None:
        assert isinstance(packing, Sequences)
        self._chunks = by_chunk.chunks(packing.offsets, count, self.walk.length(count))
        layout = self._chunks.layout
        self.length = layout.length
        # Groups of no tokens, so that as many as a walk takes at a time are left in the end. To
        # fill up what is known of groups later would be a copy of all of it.
        more = -layout.owner.shape[1] % LENGTH
        self._starts = jnp.pad(self._chunks.start, ((0, 0), (0, more)))
        self._owner = jnp.pad(layout.owner, ((0, 0), (0, more)))
        marks = by_chunk.concat_chunks(self._chunks.marks, self.length, segments.PADDING)
        more_tokens = (0, more * self.length)
        self.marks = jnp.pad(marks, ((0, 0), more_tokens), constant_values=segments.PADDING)
        self.starts, self.count = None, self.marks.shape[1]
        self._lengths = jnp.diff(layout.offsets)
        # The groups with the first and with the last token of each sequence.
        self._first, self._last = layout.first[:, :-1], layout.first[:, 1:] - 1
        self._saved = sequences.layout(packing.offsets, count)
        group, number = self._chunks.place
        place = jnp.clip(group * self.length + number, 0, self.count - 1)
        row = lax.broadcasted_iota(jnp.int32, place.shape, 0)
        # Without a barrier XLA computes the places anew for each channel.
        self._places, self._there = lax.optimization_barrier(
            (row * self.count + place, self._chunks.there[..., None])
        )

    def _of(self, x: Array, number: Array) -> Array:
        """Of [B, M, ...] those with the numbers [B, N]."""
        number = jnp.clip(number, 0, x.shape[1] - 1)
        return x[lax.broadcasted_iota(jnp.int32, number.shape, 0), number]

    def cut(self, x: Array) -> Any:
        return Apart(x, self._starts)

    def cleared(self, token: Token, x: Array) -> Array:
        return x

    def of_one_kernel(self) -> Token:
        # Without a barrier XLA puts the walk of the forward pass into the same kernel.
        return lax.optimization_barrier(self.groups)

    def join(self, x: Array) -> Array:
        x = numbered(x, self._places)
        return jnp.where(self._there, x, jnp.zeros_like(x))

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
        ages, _, added = runs()
        group = self._last if walk.reverse else self._first
        number = lax.broadcasted_iota(jnp.int32, self._owner.shape, 1)
        opens = (self._of(group, self._owner) == number)[..., None]
        row = lax.broadcasted_iota(jnp.int32, group.shape, 0)
        # Sequences without tokens have no group, but even their indices must be unique.
        nowhere = number.shape[1] + lax.broadcasted_iota(jnp.int32, group.shape, 1)
        place = jnp.where(self._lengths > 0, group, nowhere)

        def put(x: Array, y: Array) -> Array:
            return x.at[row, place].set(y, mode="drop", unique_indices=True)

        at_first = jax.tree.map(lambda x: self._of(x, group), added)
        age = self._of(jnp.broadcast_to(ages, opens.shape), group)
        added = jax.tree.map(put, added, walk.after(given, age, at_first))
        before = {part: nothing(part, x[:, 0]) for part, x in given.items()}
        return jax.tree.map(put, walk.before(Runs(ages, opens, added), before), given)

    def saved(self, starts: Arrays) -> Arrays:
        owner, first = self._saved.owner, self._of(self._first, self._saved.owner)
        number = lax.broadcasted_iota(jnp.int32, owner.shape, 1)
        chunk = number - self._of(self._saved.first, owner)
        group = first + chunk * -(-self._saved.length // self.length)
        return jax.tree.map(lambda x: self._of(x, group), starts)

    def from_chunks(self, saved: Arrays) -> Arrays:
        """With PLACE, from those before the first chunk of each sequence. Where its other chunks
        are among groups depends on the lengths of sequences."""
        first = self._saved.first[:, :-1]
        given = jax.tree.map(lambda x: self._of(x, first), saved)
        return self.before_groups(given | {PLACE: jnp.zeros_like(given["num"], jnp.int32)})

    def first_largest(self, places: Array) -> Array:
        return self.at_ends(places)  # from PLACE of all groups of the sequence so far

    def since(self, place: Array) -> Array:
        lengths, first = self._lengths[..., None], self._first[..., None]
        age = jnp.where(place == 0, lengths, lengths + first * self.length - place)
        return age.astype(jnp.float32)


def tokens_of(options: Options, unrolled: bool, inputs: Arrays, packing: Packing) -> Tokens:
    """The tokens of a call, in groups as a walk with or without a loop needs them."""
    kind = TokensOfSequences if isinstance(packing, Sequences) else Tokens
    return kind(options, unrolled, inputs, packing)
