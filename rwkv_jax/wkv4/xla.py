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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Operands,
    Options,
    Result,
    Sequences,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._packing import by_chunk
from rwkv_jax.wkv4 import reference
from rwkv_jax.wkv4.signature import NOTHING, SIGNATURE
from rwkv_jax.wkv4.tokens import Read, Token, Tokens, tokens_of
from rwkv_jax.wkv4.walk import ItemFn, Kept, Runs, left, picker


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
    What runs on all platforms is traced once for all of them, so the choice is made here. A CPU
    takes sequences one chunk after another, which stay in its caches."""
    loops, unrolled = (functools.partial(run, x) for x in (False, True))
    return lax.platform_dependent(operands, cpu=loops, default=unrolled)


def _forward(options: Options, unrolled: bool, operands: Forward) -> Result:
    v, state = operands.inputs["v"], operands.state
    if v.shape[1] == 0:
        none = {part: jnp.zeros_like(x[:, None])[:, :0] for part, x in state.items()}
        return Result(v, state, none if options.save else {})
    if isinstance(operands.packing, Sequences) and not unrolled:
        one = functools.partial(_forward, options, unrolled)
        return by_chunk.forward(SIGNATURE, one, operands)
    tokens = tokens_of(options, unrolled, operands.inputs, operands.packing)
    starts = tokens.before_groups(state)

    def visit(token: Token, state: Arrays) -> tuple[Array, Any]:
        y = reference.read(tokens.inputs(token), state)
        return tokens.cleared(token, y).astype(v.dtype), {}

    ends, _, y = tokens.through(starts, visit)
    y = tokens.join(y.written().flat(tokens.count))
    end = tokens.or_given(tokens.at_ends(ends), state)
    return Result(y, end, tokens.saved(starts) if options.save else {})


def _backward(options: Options, unrolled: bool, operands: Backward) -> Gradients:
    inputs, dstate = operands.inputs, operands.dstate
    if inputs["v"].shape[1] == 0:
        return Gradients(jax.tree.map(jnp.zeros_like, inputs), dstate)
    if isinstance(operands.packing, Sequences) and not unrolled:
        one = functools.partial(_backward, options, unrolled)
        return by_chunk.backward(SIGNATURE, one, operands)
    tokens = tokens_of(options, unrolled, inputs, operands.packing)
    starts = tokens.from_chunks(operands.states)
    start = tokens.at_starts(starts)
    end, place, read = tokens.read(starts, operands.dy)
    cotangent = {part: dstate[part] for part in ("num", "den")}
    dlargest = dstate["log_max"] - _dotted(dstate, end)
    # Each walk computes the sums of tokens again. Without barriers XLA would keep in memory what
    # walks have in common, which takes longer.
    starts, read = lax.optimization_barrier((starts, read.runs))
    reverse = _Reverse(tokens, Kept(read))
    after = reverse.after_groups(cotangent | {"log_max": -end["log_max"]})
    du, dw = tokens.shared(starts, Kept(read), reverse.left(after))
    found, dstart = reverse.gradients(after, place, dlargest)
    dk, dv = tokens.join(found["k"]), tokens.join(found["v"])

    scale = jnp.exp(start["log_max"] + dstart["log_max"])
    if tokens.starts is not None:
        scale = jnp.where(tokens.starts[:, :1], 0.0, scale)
    dinitial = {part: scale * dstart[part] for part in ("num", "den")}
    here = jnp.where(place == 0, dlargest, 0.0)
    dinitial["log_max"] = _dotted(dinitial, start) + here

    (dw,) = tokens.pull_back(dw + tokens.total(dlargest * tokens.since(place)))
    gradients = {"w": dw, "u": du, "k": dk, "v": dv}
    return Gradients(
        {n: x.astype(inputs[n].dtype) for n, x in gradients.items()},
        tokens.or_given(dinitial, dstate),
    )


class _Item(NamedTuple):
    """A token of each group, whether the next one starts a segment, and what is known of its
    `y`."""

    token: Token
    starts_next: Array | None
    read: Read


class _Reverse:
    """The walk from the last token to the first, with the cotangents of the sums."""

    def __init__(self, tokens: Tokens, read: Kept) -> None:
        self._tokens, self._walk = tokens, tokens.walk._replace(reverse=True)
        self._read, self._starts, self._sliced_starts = read, None, None
        if tokens.starts is not None:
            # What cuts the tokens after this one off from it is that the next one starts a segment.
            following = jnp.pad(tokens.starts[:, 1:], ((0, 0), (0, 1)))
            self._starts = tokens.grouped(following)
            self._sliced_starts = tokens.sliced(self._starts)

    def _items(self, groups: Token, read: Kept) -> ItemFn:
        given = picker((groups, self._sliced_starts))
        return lambda i: _Item(*given(i), read=read.item(i))

    def _run(self, x: _Item) -> Runs:
        """What a token adds to the cotangents of the sums: a and -a y."""
        a = x.read.a
        log_max = jnp.where(x.token.there, -x.read.largest, NOTHING)
        added = {"num": a, "den": -a * x.read.y, "log_max": log_max}
        return Runs(x.token.there.astype(jnp.float32), x.starts_next, added)

    def after_groups(self, end: Arrays) -> Arrays:
        """The cotangents of the sums after each group, from those of the final ones."""
        tokens = self._tokens

        def runs() -> Runs:
            items, ages = self._items(tokens.groups, self._read), tokens.ages_of_groups
            return self._walk.runs(items, self._run, ages, self._starts, items(0).token.k)

        return tokens.states(self._walk, runs, end)

    def left(self, after: Arrays) -> Arrays:
        """What is left of these cotangents where the next group starts a segment."""
        return left(after, None if self._starts is None else self._starts[:, :, -1])

    def gradients(self, after: Arrays, place: Array, dlargest: Array) -> tuple[Arrays, Arrays]:
        """The gradients of k and v, and the cotangents of the given sums, from those after each
        group, and from those of the largest exponents and their places."""
        tokens = self._tokens
        place, dlargest = tokens.of_groups(place), tokens.of_groups(dlargest)

        def visit(x: _Item, after: Arrays) -> tuple[Arrays, Any]:
            inputs, after = tokens.inputs(x.token), left(after, x.starts_next)
            k, v, read = inputs["k"], inputs["v"], x.read
            bonus = jnp.exp((inputs["u"] + k) - read.largest) * read.a
            kept = jnp.exp(k + after["log_max"])
            dk = bonus * (v - read.y) + kept * (v * after["num"] + after["den"])
            dk += jnp.where(x.token.place == place, dlargest, 0.0)
            dv = bonus + kept * after["num"]
            dk, dv = (tokens.cleared(x.token, d) for d in (dk, dv))
            return {"k": dk.astype(x.token.k.dtype), "v": dv.astype(x.token.v.dtype)}, {}

        after, groups, read = lax.optimization_barrier((after, tokens.groups, self._read.runs))
        befores, _, found = self._walk.through(
            self._items(groups, Kept(read)), self._run, tokens.length, after, visit, {}
        )
        return found.written().flat(tokens.count), tokens.at_starts(befores)


def _dotted(x: Arrays, y: Arrays) -> Array:
    return x["num"] * y["num"] + x["den"] * y["den"]


IMPLEMENTATION = _Wkv4()
