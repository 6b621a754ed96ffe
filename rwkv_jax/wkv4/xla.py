"""WKV4 in plain jnp: groups of tokens side by side, and the derivative by its own formula.

Let N_t and D_t be the sums of weighted values and of weights before token t, and

    q_t = D_t + e^(u + k_t)        y_t = (N_t + e^(u + k_t) v_t) / q_t
    N_(t+1) = e^w N_t + e^(k_t) v_t        D_(t+1) = e^w D_t + e^(k_t)

Their cotangents n_t and d_t are decayed sums from the end, with a_t = dy_t / q_t:

    n_t = e^w n_(t+1) + a_t        d_t = e^w d_(t+1) - a_t y_t
    du = sum_t e^(u + k_t) a_t (v_t - y_t)        dw = sum_t e^w (N_t n_(t+1) + D_t d_(t+1))
    dk_t = e^(u + k_t) a_t (v_t - y_t) + e^(k_t) (v_t n_(t+1) + d_(t+1))
    dv_t = e^(u + k_t) a_t + e^(k_t) n_(t+1)

Both pairs of sums are kept as `Wkv4State` has them, relative to the largest weight. The final
`log_max` is the exponent of the first largest weight, less its decay. So its cotangent, less what
the cotangents of the final `num` and `den` say about the exponent that they are relative to, goes
back from token to token up to that weight.

What a group of tokens does to a state is again a state, the one after these tokens from nothing,
and a decay. So a first walk through all groups at the same time gives what each of them does, from
which the states before all groups follow, and a second walk starts from these. The cotangents take
the same way from the end.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    CHUNK,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Operands,
    Options,
    Packing,
    Result,
    Sequences,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._packing import by_chunk, segments, sequences
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.signature import NOTHING, SIGNATURE

LENGTH = 8
"""Tokens of a group, where a walk through it is no loop. On a GPU each iteration of a loop would
cost several launches of kernels, while a CPU would take seconds to compile it without a loop; there
a group is a chunk."""

LARGEST = "largest"
"""A further part of cotangents: that of the exponent of the largest weight."""


class _Wkv4(Implementation):
    """Runs everywhere, for any sizes."""

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        return "chunks in plain jax.numpy"

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return _as_the_platform_needs(functools.partial(_forward, options), operands)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return _as_the_platform_needs(functools.partial(_backward, options), operands)


def _as_the_platform_needs(run: Callable[[bool, Any], Any], operands: Any) -> Any:
    """`run(unrolled, operands)`, as walks are best on the platform that a program is lowered for.
    What runs on all platforms is traced once for all of them, so the choice is made here."""
    loops, unrolled = (functools.partial(run, x) for x in (False, True))
    return lax.platform_dependent(operands, cpu=loops, default=unrolled)


def _forward(options: Options, unrolled: bool, operands: Forward) -> Result:
    v, state = operands.inputs["v"], operands.state
    if v.shape[1] == 0:
        none = {part: jnp.zeros_like(x[:, None])[:, :0] for part, x in state.items()}
        return Result(v, state, none if options.save else {})
    groups = _Groups(options, unrolled, operands.inputs, operands.packing)
    starts, end = groups.states(groups.of_sequences(state))

    def read(token: _Token, state: Arrays) -> Array:
        y = jnp.where(token.there, reference.read(groups.inputs(token), state), 0.0)
        return y.astype(v.dtype)

    _, y = groups.through(starts, read)
    saved = groups.saved(starts) if options.save else {}
    return Result(groups.join(y), groups.of_rows(end), saved)


def _backward(options: Options, unrolled: bool, operands: Backward) -> Gradients:
    inputs = operands.inputs
    if inputs["v"].shape[1] == 0:
        return Gradients(jax.tree.map(jnp.zeros_like, inputs), operands.dstate)
    groups = _Groups(options, unrolled, inputs, operands.packing, operands.dy)
    start = groups.initial(operands.states)
    starts, end = groups.states(start)
    dend = groups.of_sequences(operands.dstate)
    dlargest = dend["log_max"] - _dotted(dend, end)
    states = groups.of_tokens(starts)
    given = dend | {"log_max": -end["log_max"], LARGEST: dlargest}
    after, dstart = groups.cotangents(states, given)
    if unrolled:
        # Such a walk is one kernel. To compute states again takes less time than to keep them.
        starts, after, groups.tokens = lax.optimization_barrier((starts, after, groups.tokens))
        states = groups.of_tokens(starts)
    du, dw, dk, dv = groups.gradients(states, after)

    scale = jnp.exp(start["log_max"] + dstart["log_max"])
    dinitial = {part: scale * dstart[part] for part in ("num", "den")}
    dinitial["log_max"] = _dotted(dinitial, start) + dstart[LARGEST]
    (dw,) = groups.pull_back(dw)
    gradients = {"w": dw, "u": du, "k": dk, "v": dv}
    return Gradients(
        {n: x.astype(inputs[n].dtype) for n, x in gradients.items()},
        groups.of_rows(groups.or_given(dinitial, dend)),
    )


class _Token(NamedTuple):
    """A token of each group: its key and value, and the cotangent of its `y` [B, n, C]; whether it
    is no padding, and whether a segment starts with it, or None if none does [B or 1, n, 1]."""

    k: Array
    v: Array
    dy: Array | None
    there: Array
    starts: Array | None


Kept: TypeAlias = Any
"""What is kept of the tokens of groups: arrays [L, B, n, ...], or a tree of arrays for each i."""


class _Groups:
    """The tokens of a call in groups [B, n, L], and walks through all groups at the same time.

    A row without `cu_seqlens` is one sequence. Arrays of sequences are [B, S, C], and those of
    groups [B, n, C].
    """

    def __init__(
        self,
        options: Options,
        unrolled: bool,
        inputs: Arrays,
        packing: Packing,
        dy: Array | None = None,
    ) -> None:
        log_decay, self.pull_back = jax.vjp(
            lambda w: unbounded_log_decay(w, options.decay), inputs["w"]
        )
        # 0 tokens times a log decay of -inf, which resets a state, would be NaN.
        self._log_decay = jnp.maximum(log_decay, jnp.finfo(jnp.float32).min)[:, None]
        self._u = inputs["u"].astype(jnp.float32)[:, None]
        rows, self._count, _ = inputs["k"].shape
        self._unrolled, self._chunks = unrolled, None
        self._length = min(LENGTH if unrolled else CHUNK, self._count)
        starts = None
        if isinstance(packing, Sequences):
            self._chunks = by_chunk.chunks(packing.offsets, self._count, self._length)
            self._saved = sequences.layout(packing.offsets, self._count)
            first, self._owner = self._chunks.layout.first, self._chunks.layout.owner
            self._first, self._last = first[:, :-1], first[:, 1:] - 1
            there = jnp.moveaxis(self._chunks.marks, 0, 1)[..., None] != segments.PADDING
        else:
            there = jnp.ones((1, self._count, 1), bool)
            if isinstance(packing, Marks):
                marks = packing.marks[..., None]
                there, starts = marks != segments.PADDING, self._cut(marks == segments.STARTS)
            there = self._cut(there)
            self._owner = jnp.zeros((rows, there.shape[1]), jnp.int32)
            self._first = self._owner[:, :1]
            self._last = self._first + there.shape[1] - 1
        self._ages = jnp.sum(there, axis=2, dtype=jnp.float32)
        dy = None if dy is None else self._cut(dy)
        self.tokens = _Token(self._cut(inputs["k"]), self._cut(inputs["v"]), dy, there, starts)
        if self._chunks is not None:  # Not in each walk, where it takes longer.
            self.tokens = lax.optimization_barrier(self.tokens)

    def _cut(self, x: Array) -> Array:
        """The tokens of rows [B, T, ...] in groups, filled up with zeros."""
        if self._chunks is not None:
            return jnp.moveaxis(self._chunks.cut(x), 0, 1)
        batch, count, *rest = x.shape
        number = -(-count // self._length)
        x = jnp.pad(x, [(0, 0), (0, number * self._length - count)] + [(0, 0)] * len(rest))
        return x.reshape(batch, number, self._length, *rest)

    def join(self, kept: Kept) -> Array:
        """The tokens of rows [B, T, ...]."""
        # XLA would otherwise compute the walk anew for each i.
        kept = lax.optimization_barrier(kept)
        x = jnp.stack(kept, axis=2) if isinstance(kept, list) else jnp.moveaxis(kept, 0, 2)
        if self._chunks is not None:
            return self._chunks.join(jnp.moveaxis(x, 1, 0))
        rows, groups, length, channels = x.shape
        return x.reshape(rows, groups * length, channels)[:, : self._count]

    # States.

    def of_sequences(self, state: Arrays) -> Arrays:
        """States as callers have them."""
        return state if self._chunks else {part: x[:, None] for part, x in state.items()}

    def of_rows(self, state: Arrays) -> Arrays:
        """The inverse."""
        return state if self._chunks else {part: x[:, 0] for part, x in state.items()}

    def saved(self, starts: Arrays) -> Arrays:
        """The states before each chunk, from those before each group."""
        if self._chunks is None:
            return {part: x[:, :: max(CHUNK // self._length, 1)] for part, x in starts.items()}
        owner = self._saved.owner
        number = lax.broadcasted_iota(jnp.int32, owner.shape, 1)
        chunk = number - _at(self._saved.first, owner)
        group = _at(self._first, owner) + chunk * -(-self._saved.length // self._length)
        return {part: _at(x, group) for part, x in starts.items()}

    def initial(self, saved: Arrays) -> Arrays:
        """The states before sequences, from those before each chunk."""
        first = self._first if self._chunks is None else self._saved.first[:, :-1]
        return {part: _at(x, first) for part, x in saved.items()}

    def or_given(self, states: Arrays, given: Arrays) -> Arrays:
        """What was given of sequences without tokens, and `states` of all others."""
        there = (self._last >= self._first)[..., None]
        return {part: jnp.where(there, x, given[part]) for part, x in states.items()}

    def states(self, given: Arrays) -> tuple[Arrays, Arrays]:
        """The states before each group, and the final ones, from those before sequences."""
        added, _ = self.through(self._empty(*SIGNATURE.state), lambda token, state: ())
        return self._chain(added, given)

    def of_tokens(self, starts: Arrays) -> Kept:
        """The states that tokens read, from those before groups."""
        return self.through(starts, lambda token, state: state)[1]

    def cotangents(self, states: Kept, given: Arrays) -> tuple[Arrays, Arrays]:
        """The cotangents of the sums after each group, and before sequences, from the states of
        tokens and from the cotangents after sequences."""
        (added, _), _ = self._back(states, self._empty(*SIGNATURE.state, LARGEST))
        return self._chain(added, given, reverse=True)

    def gradients(self, states: Kept, after: Arrays) -> tuple[Array, Array, Array, Array]:
        """Those of u, of the log decay, of k and of v, from the states of tokens and the cotangents
        after groups."""
        (_, sums), kept = self._back(states, after)
        du, dw = (jnp.sum(x, axis=1) for x in sums)
        if isinstance(kept, list):
            dk, dv = (self.join(list(xs)) for xs in zip(*kept, strict=True))
        else:
            dk, dv = map(self.join, kept)
        return du, dw, dk, dv

    def _empty(self, *parts: str) -> Arrays:
        """For each group the state before any token."""
        zeros = jnp.zeros_like(self.tokens.k[:, :, 0], jnp.float32)
        return {part: _nothing(part, zeros) for part in parts}

    def _chain(
        self, added: Arrays, given: Arrays, *, reverse: bool = False
    ) -> tuple[Arrays, Arrays]:
        """The states on the near side of each group and on the far side of each sequence, from
        what the tokens of groups make of nothing and from the states that sequences begin with."""
        first, last = (self._last, self._first) if reverse else (self._first, self._last)
        number = lax.broadcasted_iota(jnp.int32, self._owner.shape, 1)
        opens = (_at(first, self._owner) == number)[..., None]
        enter = {part: _at(x, self._owner) for part, x in given.items()}
        starts = self.tokens.starts
        cut = None if starts is None else jnp.any(starts, axis=2)
        # The group that a sequence begins with has its own state before it.
        entered = self._add(_left(enter, cut), self._ages, added)
        if entered["num"].shape[1] == 1 and self._chunks is None:
            return enter, entered
        added = {part: jnp.where(opens, entered[part], x) for part, x in added.items()}
        cut = opens if cut is None else opens | cut

        def passed(state: Arrays, run: tuple[Array, Array, Arrays]) -> tuple[Arrays, Arrays]:
            ages, cut, added = run
            after = self._add(_left(state, cut), ages, added)
            return after, after

        runs = self._ages, cut, added
        if self._unrolled:
            _, _, upto = lax.associative_scan(
                lambda x, y: (x[0] + y[0], x[1] | y[1], passed(x[2], y)[0]), runs, reverse, axis=1
            )
        else:  # This takes less time to compile.
            each = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, None], 1, 0), runs)
            nothing = {part: _nothing(part, x[:, :1]) for part, x in added.items()}
            _, upto = lax.scan(passed, nothing, each, reverse=reverse)
            upto = {part: jnp.moveaxis(x[:, :, 0], 0, 1) for part, x in upto.items()}
        shift = -1 if reverse else 1
        before = {p: jnp.where(opens, enter[p], jnp.roll(x, shift, 1)) for p, x in upto.items()}
        end = self.or_given({part: _at(x, last) for part, x in upto.items()}, given)
        return lax.optimization_barrier((before, end))

    # Walks.

    def _walk(
        self,
        step: Callable[[Any, _Token, Any], tuple[Any, Any]],
        carry: Any,
        kept: Kept = None,
        *,
        reverse: bool = False,
    ) -> tuple[Any, Kept]:
        """As `lax.scan`, with `step(carry, token, kept of this token)`."""

        def item(i: Any) -> tuple[_Token, Any]:
            def picked(tree: Any, axis: int) -> Any:
                return jax.tree.map(
                    lambda x: lax.dynamic_index_in_dim(x, i, axis, keepdims=False), tree
                )

            own = kept[i] if isinstance(kept, list) else picked(kept, 0)
            return picked(self.tokens, 2), own

        if not self._unrolled:
            numbers = lax.iota(jnp.int32, self._length)
            return lax.scan(lambda x, i: step(x, *item(i)), carry, numbers, reverse=reverse)
        found, traced_once = [None] * self._length, jax.jit(step)
        for i in range(self._length)[:: -1 if reverse else 1]:
            carry, found[i] = traced_once(carry, *item(i))
        return carry, found

    def through(
        self, states: Arrays, visit: Callable[[_Token, Arrays], Any]
    ) -> tuple[Arrays, Kept]:
        """The states after groups, and `visit(token, state)` of each token with the state that it
        reads."""

        def step(state: Arrays, token: _Token, _: None) -> tuple[Arrays, Any]:
            state, inputs = _left(state, token.starts), self.inputs(token)
            ages = token.there.astype(jnp.float32)
            added = {"num": inputs["v"], "den": ages, "log_max": inputs["k"]}
            after = reference.add(state, ages * self._log_decay, added)
            return after, visit(token, state)

        return self._walk(step, states)

    def _back(self, states: Kept, after: Arrays) -> tuple[tuple[Arrays, Any], Kept]:
        """The cotangents before groups, the gradients of u and of the log decay of each group, and
        those of k and v of each token."""

        def step(carry: Any, token: _Token, state: Arrays) -> tuple[Any, Any]:
            (after, (du, dw)), there = carry, token.there
            ages = there.astype(jnp.float32)
            u, k, v = (self.inputs(token)[name] for name in "ukv")
            assert token.dy is not None
            dy = jnp.where(there, token.dy.astype(jnp.float32), 0.0)
            largest = jnp.maximum(state["log_max"], u + k)
            before, now = jnp.exp(state["log_max"] - largest), jnp.exp((u + k) - largest)
            scale = 1.0 / (before * state["den"] + now)
            y, a = (before * state["num"] + now * v) * scale, dy * scale
            decayed = state["log_max"] + ages * self._log_decay
            stays = (decayed >= k) | ~there
            dlargest = jnp.where(stays, after[LARGEST], 0.0)
            bonus, kept = now * a, jnp.exp(k + after["log_max"])
            dk = bonus * (v - y) + kept * (v * after["num"] + after["den"])
            dk += after[LARGEST] - dlargest
            dv = bonus + kept * after["num"]
            dw += ages * (jnp.exp(decayed + after["log_max"]) * _dotted(state, after) + dlargest)
            added = {"num": a, "den": -a * y, "log_max": jnp.where(there, -largest, NOTHING)}
            before = _left(reference.add(after, ages * self._log_decay, added), token.starts)
            sums = du + bonus * (v - y), dw
            dk, dv = (jnp.where(there, x, 0.0).astype(token.k.dtype) for x in (dk, dv))
            return (before | {LARGEST: dlargest}, sums), (dk, dv)

        zeros = jnp.zeros_like(after["num"])
        return self._walk(step, (after, (zeros, zeros)), states, reverse=True)

    def inputs(self, token: _Token) -> Arrays:
        """The inputs of a token in float32, as those of one that weighs nothing where it is
        padding."""
        return {
            "u": self._u,
            "k": jnp.where(token.there, token.k.astype(jnp.float32), NOTHING),
            "v": jnp.where(token.there, token.v.astype(jnp.float32), 0.0),
        }

    def _add(self, state: Arrays, ages: Array, added: Arrays) -> Arrays:
        """The state after runs of tokens, from the one before them, how many they are without
        padding, and what they make of nothing."""
        after = reference.add(state, ages * self._log_decay, added)
        if LARGEST in added:
            after[LARGEST] = state[LARGEST] * added[LARGEST]
        return after


def _left(state: Arrays, starts: Array | None) -> Arrays:
    """What is left of the states before runs."""
    if starts is None:
        return state
    return {part: jnp.where(starts, _nothing(part, x), x) for part, x in state.items()}


def _nothing(part: str, x: Array) -> Array:
    """A part of states like `x` before any token."""
    return jnp.full_like(x, {"log_max": NOTHING, LARGEST: 1}.get(part, 0))


def _at(x: Array, number: Array) -> Array:
    """Of [B, M, ...] those with the numbers [B, N]."""
    number = jnp.clip(number, 0, x.shape[1] - 1)
    return x[lax.broadcasted_iota(jnp.int32, number.shape, 0), number]


def _dotted(x: Arrays, y: Arrays) -> Array:
    return x["num"] * y["num"] + x["den"] * y["den"]


IMPLEMENTATION = _Wkv4()
