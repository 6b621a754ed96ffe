"""WKV4 in plain jnp: groups of tokens side by side, and the derivative by its own formula.

Let N_t and D_t be the sums of weighted values and of weights before token t, and

    q_t = D_t + e^(u + k_t)        y_t = (N_t + e^(u + k_t) v_t) / q_t
    N_(t+1) = e^w N_t + e^(k_t) v_t        D_(t+1) = e^w D_t + e^(k_t)

Their cotangents n_t and d_t are decayed sums from the end, with a_t = dy_t / q_t:

    n_t = e^w n_(t+1) + a_t        d_t = e^w d_(t+1) - a_t y_t
    du = sum_t e^(u + k_t) a_t (v_t - y_t)
    dk_t = e^(u + k_t) a_t (v_t - y_t) + e^(k_t) (v_t n_(t+1) + d_(t+1))
    dv_t = e^(u + k_t) a_t + e^(k_t) n_(t+1)
    dw = sum_t e^w (N_t n_(t+1) + D_t d_(t+1))

Both pairs of sums are kept as `Wkv4State` has them, relative to the largest weight. The final
`log_max` is the exponent of the first largest weight, which has its cotangent, less what the
cotangents of the final `num` and `den` say about the exponent that they are relative to.

The states before groups follow from what each group does to a state, which is computed side by
side. The backward pass does the same with the cotangents, from the last token to the first.
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
    Options,
    Packing,
    Result,
    Sequences,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.groups import Groups, states_between
from rwkv_jax.wkv4.reference import add
from rwkv_jax.wkv4.signature import NOTHING, SIGNATURE


class _Wkv4(Implementation):
    """Runs everywhere, for any sizes."""

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return reference.IMPLEMENTATION.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        state = operands.state
        if operands.inputs["v"].shape[1] == 0:
            none = {part: jnp.zeros_like(x[:, None])[:, :0] for part, x in state.items()}
            return Result(operands.inputs["v"], state, none if options.save else {})
        return _as_the_platform_needs(functools.partial(_forward, options), operands)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        if operands.dy.shape[1] == 0:
            return Gradients(jax.tree.map(jnp.zeros_like, operands.inputs), operands.dstate)
        return _as_the_platform_needs(functools.partial(_backward, options), operands)


def _as_the_platform_needs(run: Callable[[bool, Any], Any], operands: Any) -> Any:
    """`run(unrolled, operands)`, as scans are best on the platform that a program is lowered for.
    What runs on all platforms is traced once for all of them, so the choice is made here."""
    loops, unrolled = (functools.partial(run, x) for x in (False, True))
    return lax.platform_dependent(operands, cpu=loops, default=unrolled)


class _Token(NamedTuple):
    """One token of each group: its inputs [B, n, C], and `valid` and `starts` of `Groups`."""

    inputs: Arrays
    valid: Array | None
    starts: Array | None

    def cleared(self, x: Array, otherwise: float = 0.0) -> Array:
        """`x`, except for padding."""
        return x if self.valid is None else jnp.where(self.valid, x, otherwise)

    def reset(self, log_decay: Array) -> Array:
        """The log decay so far, -inf where a segment starts."""
        return log_decay if self.starts is None else jnp.where(self.starts, -jnp.inf, log_decay)

    def cut(self, state: Arrays) -> Arrays:
        """What is left of a state where a segment starts."""
        if self.starts is None:
            return state
        return {part: jnp.where(self.starts, x, state[part]) for part, x in _empty(state).items()}


class _Call:
    """A call with its tokens in groups: the inputs of `reference.step`, and `dy`.

    w, u: the log decay and the bonus [B, 1, C].
    tokens: `_Token` with another axis, [B, n, L, C].
    """

    def __init__(
        self, options: Options, unrolled: bool, inputs: Arrays, packing: Packing, **timed: Array
    ) -> None:
        log_decay, self.pull_back = jax.vjp(
            lambda w: unbounded_log_decay(w, options.decay), inputs["w"]
        )
        # 0 tokens times a log decay of -inf, which resets a state, would be NaN.
        self.w = jnp.maximum(log_decay, jnp.finfo(jnp.float32).min)[:, None]
        self.u = inputs["u"].astype(jnp.float32)[:, None]
        self.groups = groups = Groups(unrolled, inputs["v"].shape[1], packing)
        timed |= {name: inputs[name] for name in SIGNATURE.timed}
        cut = {name: groups.cut(x) for name, x in timed.items()}
        self.tokens = _Token(cut, groups.valid, groups.starts)

    def of(self, token: _Token) -> Arrays:
        """The inputs of tokens in float32, where padding weighs nothing."""
        padding = {"k": NOTHING}
        x = {n: x.astype(jnp.float32) for n, x in token.inputs.items()}
        x = {n: token.cleared(x, padding.get(n, 0.0)) for n, x in x.items()}
        return x | {"u": self.u, "w": token.cleared(self.w)}

    def after(self, token: _Token, x: Arrays, state: Arrays) -> Arrays:
        """The state after a token, whose inputs are `x`."""
        one = token.cleared(jnp.ones_like(x["v"]))
        return add(state, x["w"], {"num": x["v"], "den": one, "log_max": x["k"]})

    def runs(self) -> tuple[Array, Arrays]:
        """The log decay over all tokens of each group, and the state after them from nothing."""

        def step(carry: tuple[Array, Arrays], token: _Token) -> tuple[tuple[Array, Arrays], None]:
            (log_decay, state), x = carry, self.of(token)
            state = self.after(token, x, token.cut(state))
            return (token.reset(log_decay) + x["w"], state), None

        none = jnp.zeros_like(self.tokens.inputs["v"][:, :, 0], jnp.float32)
        nothing = _empty(dict.fromkeys(SIGNATURE.state, none))
        runs, _ = self.groups.scan(step, (none, nothing), self.tokens)
        # Without a barrier XLA computes the runs anew for each of the longer runs.
        return lax.optimization_barrier(runs)

    def from_start(self, state: Arrays) -> Arrays:
        """The states before each group, from those of sequences."""
        groups, state = self.groups, self.groups.of_groups(state)
        if groups.count == 1:
            return state
        return states_between(*self.runs(), state, groups.opens)

    def from_chunks(self, saved: Arrays) -> Arrays:
        """The states before each group, from those before each chunk."""
        several = self.groups.per_chunk
        if several == 1:
            return saved

        def by_chunk(x: Array, groups: int) -> Array:
            return x.reshape(-1, groups, x.shape[-1])

        runs = jax.tree.map(lambda x: by_chunk(x, several), self.runs())
        saved = {part: by_chunk(x, 1) for part, x in saved.items()}
        opens = lax.broadcasted_iota(jnp.int32, (1, several, 1), 1) == 0
        before = states_between(*runs, saved, opens)
        return {part: by_chunk(x, self.groups.count) for part, x in before.items()}


def _empty(state: Arrays) -> Arrays:
    return {part: jnp.full_like(x, SIGNATURE.empty.get(part, 0.0)) for part, x in state.items()}


def _forward(options: Options, unrolled: bool, operands: Forward) -> Result:
    call = _Call(options, unrolled, operands.inputs, operands.packing)
    groups, state = call.groups, _sequences(operands, operands.state)
    before = call.from_start(state)

    def step(state: Arrays, token: _Token) -> tuple[Arrays, Array]:
        x, state = call.of(token), token.cut(state)
        y = token.cleared(reference.read(x, state))
        return call.after(token, x, state), y.astype(operands.inputs["v"].dtype)

    after, y = groups.scan(step, before, call.tokens)
    end = groups.or_given(groups.at_last(after), state)
    saved = {part: x[:, :: groups.per_chunk] for part, x in before.items()}
    return Result(groups.join(y), _rows(operands, end), saved if options.save else {})


class _Read(NamedTuple):
    """What a token reads: y, a and e^(u + k) a, and the exponent that a is relative to."""

    y: Array
    a: Array
    bonus: Array
    largest: Array
    stays: Array


def _read(x: Arrays, state: Arrays) -> _Read:
    own, log_max = x["u"] + x["k"], state["log_max"]
    largest = jnp.maximum(log_max, own)
    before, now = jnp.exp(log_max - largest), jnp.exp(own - largest)
    scale = 1.0 / (before * state["den"] + now)
    y = (before * state["num"] + now * x["v"]) * scale
    a = x["dy"] * scale
    return _Read(y, a, now * a, largest, log_max + x["w"] >= x["k"])


def _backward(options: Options, unrolled: bool, operands: Backward) -> Gradients:
    inputs = operands.inputs
    call = _Call(options, unrolled, inputs, operands.packing, dy=operands.dy)
    groups, dstate = call.groups, _sequences(operands, operands.dstate)
    before = call.from_chunks(operands.states)
    nothing, none = _empty(before), jnp.zeros_like(before["num"])
    counts = jnp.zeros_like(none, jnp.int32)

    def added(token: _Token, read: _Read) -> Arrays:
        """What a token adds to the cotangents of the sums: a and -a y."""
        log_max = token.cleared(-read.largest, NOTHING)
        return {"num": read.a, "den": -read.a * read.y, "log_max": log_max}

    def forth(carry: Any, token: _Token) -> tuple[Any, Arrays]:
        """The states before tokens, and all that a group adds to the cotangents."""
        state, log_decay, sums, larger = carry
        x, state = call.of(token), token.cut(state)
        read = _read(x, state)
        log_decay = token.reset(log_decay)
        sums = add(added(token, read), log_decay, sums)
        larger += jnp.where(read.stays, 0, 1)
        return (call.after(token, x, state), log_decay + x["w"], sums, larger), state

    def back(carry: Any, token: _Token, state: Arrays) -> tuple[Any, Arrays]:
        """The gradients, from the cotangents of the sums and of the largest exponent after a
        token."""
        (after, dlargest, du, dw), x = carry, call.of(token)
        read, kept = _read(x, state), jnp.exp(x["k"] + after["log_max"])
        du_here = read.bonus * (x["v"] - read.y)
        stays = jnp.where(read.stays, dlargest, 0.0)
        dk = du_here + kept * (x["v"] * after["num"] + after["den"]) + (dlargest - stays)
        dv = read.bonus + kept * after["num"]
        passed = jnp.exp((state["log_max"] + after["log_max"]) + x["w"])
        dw += token.cleared(passed * _dotted(state, after) + stays)
        carry = token.cut(add(after, x["w"], added(token, read))), stays, du + du_here, dw
        dk, dv = (token.cleared(d).astype(inputs["v"].dtype) for d in (dk, dv))
        return carry, {"k": dk, "v": dv}

    (after, log_decay, sums, larger), states = groups.scan(
        forth, (before, none, nothing, counts), call.tokens
    )
    end = groups.at_last(after)
    dlargest = dstate["log_max"] - _dotted(dstate, end)
    larger = jnp.cumsum(larger, axis=1)
    last = larger == groups.of_groups(groups.at_last(larger))
    dlargest = jnp.where(last, groups.of_groups(dlargest), 0.0)
    given = groups.of_groups(dstate | {"log_max": -end["log_max"]})
    cotangents = states_between(log_decay, sums, given, groups.closes, reverse=True)
    tokens = call.tokens
    if unrolled:  # There states of tokens are computed again, and never kept in memory.
        before, tokens, cotangents = lax.optimization_barrier((before, tokens, cotangents))
        _, states = groups.scan(forth, (before, none, nothing, counts), tokens)
    (dstart, dlargest, du, dw), found = groups.scan(
        back, (cotangents, dlargest, none, none), tokens, states, reverse=True
    )
    start, dstart, dlargest = groups.at_first((before, dstart, dlargest))
    scale = jnp.exp(start["log_max"] + dstart["log_max"])
    dinitial = {part: scale * dstart[part] for part in ("num", "den")}
    dinitial["log_max"] = _dotted(dinitial, start) + dlargest
    du, dw = (jnp.sum(x, axis=1) for x in (du, dw))
    (dw,) = call.pull_back(dw)
    gradients = {"w": dw.astype(inputs["w"].dtype), "u": du.astype(inputs["u"].dtype)}
    gradients |= groups.join(found)
    return Gradients(gradients, _rows(operands, groups.or_given(dinitial, dstate)))


def _sequences(operands: Forward | Backward, state: Arrays) -> Arrays:
    """States [B, S, C]."""
    if isinstance(operands.packing, Sequences):
        return state
    return {part: x[:, None] for part, x in state.items()}


def _rows(operands: Forward | Backward, state: Arrays) -> Arrays:
    if isinstance(operands.packing, Sequences):
        return state
    return {part: x[:, 0] for part, x in state.items()}


def _dotted(x: Arrays, y: Arrays) -> Array:
    """The sum of the products of the numerators and of the denominators."""
    return x["num"] * y["num"] + x["den"] * y["den"]


IMPLEMENTATION = _Wkv4()
