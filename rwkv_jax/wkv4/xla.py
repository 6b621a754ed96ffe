"""WKV4 in plain jnp: groups of tokens side by side, and the derivative by its own formula.

Let N_t and D_t be the sums of weighted values and of weights before token t, and

    q_t = D_t + e^(u + k_t)        y_t = (N_t + e^(u + k_t) v_t) / q_t
    N_(t+1) = e^w N_t + e^(k_t) v_t        D_(t+1) = e^w D_t + e^(k_t)

Their cotangents n_t and d_t are decayed sums from the end, with a_t = dy_t / q_t:

    n_t = e^w n_(t+1) + a_t        d_t = e^w d_(t+1) - a_t y_t
    du = sum_t e^(u + k_t) a_t (v_t - y_t)
    dk_t = e^(u + k_t) a_t (v_t - y_t) + e^(k_t) (v_t n_(t+1) + d_(t+1))
    dv_t = e^(u + k_t) a_t + e^(k_t) n_(t+1)
    dw = sum_t a_t (N'_t - y_t D'_t)        N'_(t+1) = e^w (N'_t + N_t)

where N' and D' are the derivatives of the sums by w. In a group of tokens they start with 0, since
the cotangents of the sums after the group, times N' and D' there, are the terms of later tokens.

Both pairs of sums are kept as `Wkv4State` has them, relative to the largest weight. The final
`log_max` is the exponent of the first largest weight, which has its cotangent, less what the
cotangents of the final `num` and `den` say about the exponent that they are relative to.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.saved import CHUNK, chunks
from rwkv_jax._packing import segments
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.signature import NOTHING
from rwkv_jax.wkv4.walk import SLOPES, ItemFn, Kept, Runs, VisitFn, Walk, grouped, left, picker


class _Wkv4(Implementation):
    """Runs everywhere, for any sizes."""

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return reference.IMPLEMENTATION.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return _as_the_platform_needs(functools.partial(self._forward, options), operands)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return _as_the_platform_needs(functools.partial(self._backward, options), operands)

    def _forward(self, options: Options, unrolled: bool, operands: Forward) -> Result:
        v, state = operands.inputs["v"], operands.state
        if v.shape[1] == 0:
            none = {part: jnp.zeros_like(x[:, None])[:, :0] for part, x in state.items()}
            return Result(v, state, none if options.save else {})
        tokens = _Tokens(options, unrolled, operands.inputs, operands.packing)
        starts = tokens.before_groups(state)

        def visit(token: _Token, state: Arrays) -> tuple[Array, Any]:
            return reference.read(tokens.inputs(token), state).astype(v.dtype), {}

        ends, _, y = tokens.through(starts, visit)
        (y,) = segments.cleared(tokens.marks, [y.written().flat(v.shape[1])])
        end = jax.tree.map(lambda x: x[:, -1], ends)
        return Result(y, end, tokens.saved(starts) if options.save else {})

    def _backward(self, options: Options, unrolled: bool, operands: Backward) -> Gradients:
        inputs, dstate = operands.inputs, operands.dstate
        if inputs["v"].shape[1] == 0:
            return Gradients(jax.tree.map(jnp.zeros_like, inputs), dstate)
        tokens = _Tokens(options, unrolled, inputs, operands.packing)
        (dy,) = segments.cleared(tokens.marks, [operands.dy])
        start = {part: x[:, 0] for part, x in operands.states.items()}
        starts = tokens.from_chunks(operands.states)
        end, read = tokens.read(starts, dy)
        cotangent = {part: dstate[part] for part in ("num", "den")}
        dlargest = dstate["log_max"] - _dotted(dstate, end)
        place, age = tokens.first_largest(start["log_max"])
        # Each walk computes the sums of tokens again. Without barriers XLA would keep in memory
        # what walks have in common, which takes longer.
        starts, read = lax.optimization_barrier((starts, read.runs))
        reverse = _Reverse(tokens, Kept(read))
        after = reverse.after_groups(cotangent | {"log_max": -end["log_max"]})
        du, dw = tokens.shared(starts, Kept(read), reverse.left(after))
        found, dstart = reverse.gradients(after, place, dlargest)
        dk, dv = segments.cleared(tokens.marks, [found["k"], found["v"]])

        scale = jnp.exp(start["log_max"] + dstart["log_max"])
        if tokens.starts is not None:
            scale = jnp.where(tokens.starts[:, :1], 0.0, scale)
        dinitial = {part: scale * dstart[part] for part in ("num", "den")}
        here = jnp.where(place == 0, dlargest, 0.0)
        dinitial["log_max"] = _dotted(dinitial, start) + here

        (dw,) = tokens.pull_back(dw + dlargest * age)
        gradients = {"w": dw, "u": du, "k": dk, "v": dv}
        return Gradients({n: x.astype(inputs[n].dtype) for n, x in gradients.items()}, dinitial)


def _as_the_platform_needs(run: Callable[[bool, Any], Any], operands: Any) -> Any:
    """`run(unrolled, operands)`, as walks are best on the platform that a program is lowered for.
    What runs on all platforms is traced once for all of them, so the choice is made here."""
    loops, unrolled = (functools.partial(run, x) for x in (False, True))
    return lax.platform_dependent(operands, cpu=loops, default=unrolled)


class _Token(NamedTuple):
    """One token of each group: how many it is [B or 1, n], 0 or 1, whether a segment starts with
    it, and its key and value [B, n, C]."""

    age: Array
    starts: Array | None
    k: Array
    v: Array


class _Read(NamedTuple):
    """`y` of a token of each group, a, and the exponent that a is relative to [B, n, C]."""

    y: Array
    a: Array
    largest: Array


class _Tokens:
    """The tokens of a call, in groups [B, n, L] of so many tokens each."""

    def __init__(self, options: Options, unrolled: bool, inputs: Arrays, packing: Packing) -> None:
        k, v = inputs["k"], inputs["v"]
        log_decay, self.pull_back = jax.vjp(
            lambda w: unbounded_log_decay(w, options.decay), inputs["w"]
        )
        self.walk = Walk(log_decay, unrolled)
        self.count = k.shape[1]
        self.length = self.walk.length(self.count)
        self.marks = packing.marks if isinstance(packing, Marks) else None
        if self.marks is None:
            self.ages, self.starts = jnp.ones((1, self.count), jnp.float32), None
        else:
            self.ages = (self.marks != segments.PADDING).astype(jnp.float32)
            self.starts = self.marks == segments.STARTS
        self._k, self._u = k, inputs["u"].astype(jnp.float32)[:, None]
        tokens = _Token(self.ages, self.starts, k, v)
        self.groups = jax.tree.map(lambda x: grouped(x, self.length), tokens)

    def inputs(self, token: _Token) -> Arrays:
        """The inputs of a token in float32, as those of one that weighs nothing where it is
        padding."""
        there = token.age[..., None] > 0
        return {
            "u": self._u,
            "k": jnp.where(there, token.k.astype(jnp.float32), NOTHING),
            "v": jnp.where(there, token.v.astype(jnp.float32), 0.0),
        }

    def _run(self, token: _Token) -> Runs:
        inputs = self.inputs(token)
        added = {"num": inputs["v"], "den": token.age[..., None], "log_max": inputs["k"]}
        return Runs(token.age, token.starts, added)

    def through(self, starts: Arrays, visit: VisitFn) -> tuple[Arrays, Any, Kept]:
        """Walk through the groups from the states before them, and visit each token with the state
        that it reads."""

        def of_token(token: _Token, state: Arrays) -> tuple[Any, Any]:
            return visit(token, left(state, token.starts))

        return self.walk.through(picker(self.groups), self._run, self.length, starts, of_token, {})

    def runs(self) -> Runs:
        """The groups as runs."""
        ages, starts, k, _ = self.groups
        return self.walk.runs(picker(self.groups), self._run, ages, starts, k[:, :, 0])

    def before_groups(self, state: Arrays) -> Arrays:
        """The states before each group, from the one before all tokens."""
        if self.length == self.count:
            return jax.tree.map(lambda x: x[:, None], state)
        return self.walk.before(self.runs(), state)

    def saved(self, starts: Arrays) -> Arrays:
        """The states before each chunk, from those before each group."""
        return jax.tree.map(lambda x: x[:, :: max(CHUNK // self.length, 1)], starts)

    def from_chunks(self, saved: Arrays) -> Arrays:
        """The states before each group, from those before each chunk."""
        groups = -(-self.count // self.length)
        if groups == chunks(self.count):
            return saved
        several = jax.tree.map(lambda x: grouped(x, CHUNK // self.length), self.runs())
        return self.walk.inside(several, saved, groups)

    def read(self, starts: Arrays, dy: Array) -> tuple[Arrays, Kept]:
        """The state after all tokens, and `_Read` of each, from the states before each group and
        the cotangents of `y`."""

        def visit(item: tuple[_Token, Array], state: Arrays) -> tuple[_Read, Any]:
            token, dy = item
            inputs, state = self.inputs(token), left(state, token.starts)
            own = inputs["u"] + inputs["k"]
            largest = jnp.maximum(state["log_max"], own)
            before, now = jnp.exp(state["log_max"] - largest), jnp.exp(own - largest)
            scale = 1.0 / (before * state["den"] + now)
            y = (before * state["num"] + now * inputs["v"]) * scale
            return _Read(y, dy.astype(jnp.float32) * scale, largest), {}

        groups = picker((self.groups, grouped(dy, self.length)))
        ends, _, read = self.walk.through(
            groups, lambda item: self._run(item[0]), self.length, starts, visit, {}
        )
        return jax.tree.map(lambda x: x[:, -1], ends), read.written()

    def shared(self, starts: Arrays, read: Kept, after: Arrays) -> tuple[Array, Array]:
        """The gradients of u and of the log decay [B, C], from the states before each group and the
        cotangents of the sums after it."""
        given = picker(self.groups)

        def visit(item: tuple[_Token, _Read], state: Arrays) -> tuple[Any, Arrays]:
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


class _Item(NamedTuple):
    """A token of each group, whether the next one starts a segment, the token's number in the row
    from 1 on [1, n], and what is known of its `y`."""

    token: _Token
    starts_next: Array | None
    place: Array
    read: _Read


class _Reverse:
    """The walk from the last token to the first, with the cotangents of the sums."""

    def __init__(self, tokens: _Tokens, read: Kept) -> None:
        self._tokens, self._walk = tokens, tokens.walk._replace(reverse=True)
        self._read, self._starts = read, None
        if tokens.starts is not None:
            # What cuts the tokens after this one off from it is that the next one starts a segment.
            following = jnp.pad(tokens.starts[:, 1:], ((0, 0), (0, 1)))
            self._starts = grouped(following, tokens.length)
        self._places = grouped(lax.iota(jnp.int32, tokens.count)[None] + 1, tokens.length)

    def _items(self, groups: _Token, read: Kept) -> ItemFn:
        given = picker((groups, self._starts, self._places))
        return lambda i: _Item(*given(i), read=read.item(i))

    def _run(self, x: _Item) -> Runs:
        """What a token adds to the cotangents of the sums: a and -a y."""
        there, a = x.token.age[..., None] > 0, x.read.a
        log_max = jnp.where(there, -x.read.largest, NOTHING)
        return Runs(
            x.token.age, x.starts_next, {"num": a, "den": -a * x.read.y, "log_max": log_max}
        )

    def after_groups(self, end: Arrays) -> Arrays:
        """The cotangents of the sums after each group, from those after all tokens."""
        tokens, groups = self._tokens, self._tokens.groups
        if tokens.length == tokens.count:
            return jax.tree.map(lambda x: x[:, None], end)
        items, like = self._items(groups, self._read), groups.k[:, :, 0]
        return self._walk.before(
            self._walk.runs(items, self._run, groups.age, self._starts, like), end
        )

    def left(self, after: Arrays) -> Arrays:
        """What is left of these cotangents where the next group starts a segment."""
        return left(after, None if self._starts is None else self._starts[:, :, -1])

    def gradients(self, after: Arrays, place: Array, dlargest: Array) -> tuple[Arrays, Arrays]:
        """The gradients of k and v, and the cotangents of the sums before all tokens, from those
        after each group, and from that of the largest exponent and its place [B, C]."""
        tokens = self._tokens

        def visit(x: _Item, after: Arrays) -> tuple[Arrays, Any]:
            inputs, after = tokens.inputs(x.token), left(after, x.starts_next)
            k, v, read = inputs["k"], inputs["v"], x.read
            bonus = jnp.exp((inputs["u"] + k) - read.largest) * read.a
            kept = jnp.exp(k + after["log_max"])
            dk = bonus * (v - read.y) + kept * (v * after["num"] + after["den"])
            is_largest = x.place[..., None] == place[:, None]
            dk += jnp.where(is_largest, dlargest[:, None], 0.0)
            dv = bonus + kept * after["num"]
            return {"k": dk.astype(x.token.k.dtype), "v": dv.astype(x.token.v.dtype)}, {}

        after, groups, read = lax.optimization_barrier((after, tokens.groups, self._read.runs))
        befores, _, found = self._walk.through(
            self._items(groups, Kept(read)), self._run, tokens.length, after, visit, {}
        )
        before = jax.tree.map(lambda x: x[:, 0], befores)
        return found.written().flat(tokens.count), before


def _dotted(x: Arrays, y: Arrays) -> Array:
    """The sum of the products of the numerators and of the denominators."""
    return x["num"] * y["num"] + x["den"] * y["den"]


IMPLEMENTATION = _Wkv4()
