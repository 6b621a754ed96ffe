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
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.groups import Groups, joined, states_before
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
    """A token of each group [B, n, ...], or all tokens [B, n, L, ...]: `valid` and `starts` of
    `Groups`, and k, v and in the backward pass dy."""

    inputs: Arrays
    valid: Array | None
    starts: Array | None

    def cleared(self, x: Array, padding: float = 0.0) -> Array:
        """`x`, except for padding."""
        return x if self.valid is None else jnp.where(self.valid, x, padding)

    def cut(self, x: Array, otherwise: float) -> Array:
        """`x`, except where a segment starts."""
        return x if self.starts is None else jnp.where(self.starts, otherwise, x)

    def left(self, state: Arrays) -> Arrays:
        """What is left of a state where a segment starts."""
        return {part: self.cut(x, SIGNATURE.empty.get(part, 0.0)) for part, x in state.items()}


class _Call:
    """The tokens of a call, and what the scans of both passes do with one."""

    def __init__(self, options: Options, unrolled: bool, packing: Packing, **inputs: Array) -> None:
        log_decay, self.pull_back = jax.vjp(
            lambda w: unbounded_log_decay(w, options.decay), inputs.pop("w")
        )
        # 0 tokens times a log decay of -inf, which resets a state, would be NaN.
        self._w = jnp.maximum(log_decay, jnp.finfo(jnp.float32).min)[:, None]
        self._u = inputs.pop("u").astype(jnp.float32)[:, None]
        self.groups = groups = Groups(unrolled, inputs["v"].shape[1], packing)
        cut = {name: groups.cut(x) for name, x in inputs.items()}
        self.tokens = _Token(cut, groups.valid, groups.starts)
        self.none = jnp.zeros_like(cut["v"][:, :, 0], jnp.float32)
        self.nothing = {p: self.none + SIGNATURE.empty.get(p, 0.0) for p in SIGNATURE.state}

    def inputs(self, token: _Token) -> Arrays:
        """The inputs in float32, w as the log decay, and those of padding as of no weight."""
        x = {name: x.astype(jnp.float32) for name, x in token.inputs.items()}
        x = {n: token.cleared(x, NOTHING if n == "k" else 0.0) for n, x in x.items()}
        return x | {"u": self._u, "w": token.cleared(self._w)}

    def after(self, token: _Token, x: Arrays, state: Arrays) -> Arrays:
        """The state after a token with the inputs x."""
        weight = token.cleared(jnp.ones_like(x["v"]))
        return add(state, x["w"], {"num": x["v"], "den": weight, "log_max": x["k"]})

    def states_before(self, given: Arrays, opens: Array) -> Arrays:
        """The states before each group, from those before the groups that open something."""

        def step(run: tuple[Array, Arrays], token: _Token) -> tuple[tuple[Array, Arrays], None]:
            (log_decay, state), x = run, self.inputs(token)
            log_decay = token.cut(log_decay, -jnp.inf) + x["w"]
            return (log_decay, self.after(token, x, token.left(state))), None

        if opens.shape[1] == 1:
            return given
        runs, _ = self.groups.scan(step, (self.none, self.nothing), self.tokens)
        # Without a barrier XLA computes the runs anew in each step of the scan over groups.
        return states_before(lax.optimization_barrier(runs), given, opens)


def _forward(options: Options, unrolled: bool, operands: Forward) -> Result:
    call = _Call(options, unrolled, operands.packing, **operands.inputs)
    groups, given = call.groups, _by_sequence(operands.state)
    before = call.states_before(groups.of(given), groups.opens)

    def step(state: Arrays, token: _Token) -> tuple[Arrays, Array]:
        x, state = call.inputs(token), token.left(state)
        y = token.cleared(reference.read(x, state)).astype(operands.inputs["v"].dtype)
        return call.after(token, x, state), y

    after, y = groups.scan(step, before, call.tokens)
    end = groups.or_given(groups.at_last(after), given)
    saved = {part: x[:, :: groups.per_chunk] for part, x in before.items()}
    return Result(groups.join(y), _like(end, operands.state), saved if options.save else {})


class _Read(NamedTuple):
    """What a token reads, y, and what its gradients are made of.

    bonus: e^(u + k) a.
    added: what is added to the cotangents of the sums, a and -a y, relative to the exponent of a.
    stays: whether the largest exponent so far stays the largest.
    """

    y: Array
    bonus: Array
    added: Arrays
    stays: Array


def _read(token: _Token, x: Arrays, state: Arrays) -> _Read:
    own, log_max = x["u"] + x["k"], state["log_max"]
    largest = jnp.maximum(log_max, own)
    before, now = jnp.exp(log_max - largest), jnp.exp(own - largest)
    scale = 1.0 / (before * state["den"] + now)
    y = (before * state["num"] + now * x["v"]) * scale
    a = x["dy"] * scale
    added = {"num": a, "den": -a * y, "log_max": token.cleared(-largest, NOTHING)}
    return _Read(y, now * a, added, log_max + x["w"] >= x["k"])


def _backward(options: Options, unrolled: bool, operands: Backward) -> Gradients:
    inputs, dstate = operands.inputs, _by_sequence(operands.dstate)
    call = _Call(options, unrolled, operands.packing, **inputs, dy=operands.dy)
    groups, tokens, none = call.groups, call.tokens, call.none
    before = operands.states
    if groups.per_chunk > 1:
        given = {part: jnp.repeat(x, groups.per_chunk, axis=1) for part, x in before.items()}
        before = call.states_before(given, groups.opens_chunk)

    def forth(carry: Any, token: _Token) -> tuple[Any, Arrays]:
        """The states before tokens, and all that a group adds to the cotangents."""
        (state, log_decay, added, larger), x = carry, call.inputs(token)
        state, log_decay = token.left(state), token.cut(log_decay, -jnp.inf)
        read = _read(token, x, state)
        join = add if token.starts is None else joined
        added = join(read.added, log_decay, added)
        larger += jnp.where(read.stays, 0, 1)
        return (call.after(token, x, state), log_decay + x["w"], added, larger), state

    def back(carry: Any, token: _Token, state: Arrays) -> tuple[Any, Arrays]:
        """The gradients, from the cotangents of the sums and of the largest exponent."""
        (after, dlargest, du, dw), x = carry, call.inputs(token)
        read, kept = _read(token, x, state), jnp.exp(x["k"] + after["log_max"])
        bonus = read.bonus * (x["v"] - read.y)
        stays = jnp.where(read.stays, dlargest, 0.0)
        dk = bonus + kept * (x["v"] * after["num"] + after["den"]) + (dlargest - stays)
        dv = read.bonus + kept * after["num"]
        passed = jnp.exp((state["log_max"] + after["log_max"]) + x["w"]) * _dotted(state, after)
        carry = token.left(add(after, x["w"], read.added)), stays
        timed = {"k": dk, "v": dv}
        timed = {n: token.cleared(d).astype(inputs[n].dtype) for n, d in timed.items()}
        return (*carry, du + bonus, dw + token.cleared(passed + stays)), timed

    start = before, none, call.nothing, none.astype(jnp.int32)
    (after, log_decay, added, larger), states = groups.scan(forth, start, tokens)
    end = groups.at_last(after)
    given = groups.of(dstate | {"log_max": -end["log_max"]})
    cotangents = states_before((log_decay, added), given, groups.closes, reverse=True)
    # The largest exponent is that of the last token which was larger than all before it.
    larger = jnp.cumsum(larger, axis=1)
    dlargest = groups.of(dstate["log_max"] - _dotted(dstate, end))
    dlargest = jnp.where(larger == groups.of(groups.at_last(larger)), dlargest, 0.0)
    if unrolled:  # Where nothing but registers holds the states of a group, they are found again.
        start, tokens, cotangents = lax.optimization_barrier((start, tokens, cotangents))
        _, states = groups.scan(forth, start, tokens)
    start = cotangents, dlargest, none, none
    carry, timed = groups.scan(back, start, tokens, states, reverse=True)
    before, dstart, dlargest = groups.at_first((before, *carry[:2]))
    scale = jnp.exp(before["log_max"] + dstart["log_max"])
    dinitial = {part: scale * dstart[part] for part in ("num", "den")}
    dinitial["log_max"] = _dotted(dinitial, before) + dlargest
    du, dw = (jnp.sum(x, axis=1) for x in carry[2:])
    (dw,) = call.pull_back(dw)
    gradients = {"w": dw, "u": du.astype(inputs["u"].dtype), **groups.join(timed)}
    return Gradients(gradients, _like(groups.or_given(dinitial, dstate), operands.dstate))


def _by_sequence(state: Arrays) -> Arrays:
    """States [B, C] or [B, S, C] with the axis S."""
    return {part: x if x.ndim == 3 else x[:, None] for part, x in state.items()}


def _like(state: Arrays, given: Arrays) -> Arrays:
    """States with the axis S only if what was given has it."""
    return {part: state[part].reshape(x.shape) for part, x in given.items()}


def _dotted(x: Arrays, y: Arrays) -> Array:
    """The sum of the products of the numerators and of the denominators."""
    return x["num"] * y["num"] + x["den"] * y["den"]


IMPLEMENTATION = _Wkv4()
