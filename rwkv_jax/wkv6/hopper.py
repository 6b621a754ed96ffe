"""WKV6 in kernels for Hopper GPUs: 64 tokens at once, and their derivative by hand.

As in `rwkv_jax._pallas.algebra.decays`, all factors of decays are at most 1, whatever the decays:
any two tokens are in different halves of exactly one piece of 2 h tokens, with h = 32, 16, 8, 4, 2
or 1. The decay of the tokens between them is the product of two factors, which lead from each of
them to the middle of the piece, and are a matrix F_h of tokens and channels. S is the state before
the chunk, `before` and `after` are the decays of the tokens before and after each token, and `stay`
is that of all.

    Z_h = F_h times r in the second half of each piece, and times k in the first
    P_h = Z_h Z_h^T for two tokens of different halves of a piece, and else 0
    R = tril'(the sum of P_h over h)    R_ij = r_i . (decay of the tokens between) k_j for j < i
    Y = (r before) S^T + R V + diag(r . u k) V
    S_after = S diag(stay) + V^T (k after)

where tril' is the part of a matrix below the diagonal. The derivative, with D for the gradient of
the state after the chunk, and C for tril'(dY V^T) plus its transpose:

    dV = R^T dY + (k after) D^T + diag(r . u k) dY
    dS = D diag(stay) + dY^T (r before)
    dZ_h = C_h Z_h, where C_h is C for two tokens of different halves of a piece, and else 0
    dr = before (dY S) + the sum of F_h dZ_h over the h for which it is in the second half
    dk = after (V D) + the sum of F_h dZ_h over the h for which it is in the first half

To them come those of r . u k, whose gradient is dy . v. A log decay is part of many exponents, and
its gradient is the sum of theirs:

    dZ_h Z_h             of each token that has the decay between itself and the middle of its piece
    r before (dY S)      of each later token
    k after (V D)        of each earlier token
    stay (the sum of D S over the rows)

The exponents that a decay is no part of would cancel in a sum over all later tokens, but not
exactly, and where decays are strong little else is left. They do not appear here.
"""

import math

import jax.numpy as jnp
from jax import Array

from rwkv_jax._pallas.lowering import FROM_END, FROM_START
from rwkv_jax._pallas.warpgroup import (
    Chunk,
    Kernel,
    MaskFn,
    Pair,
    above,
    below,
    in_all_columns,
    in_all_rows,
)
from rwkv_jax._portable.decay import MIN_LOG_DECAY

LOG2E = 1.4426950408889634
"""Exponents are to the base 2 here, for which GPUs have an instruction."""

UNIT = 128
"""Log decays are summed as float16 numbers of 1/128. They have 11 binary digits from
MIN_LOG_DECAY on, which is -36934 units, to -3.3e-7; weaker ones have fewer."""

HALVES = (32, 16, 8, 4, 2)
"""Half the lengths of pieces with tokens between a token and the middle. For h = 1 there are none,
and all factors are 1."""


def _log_decay(chunk: Chunk) -> Array:
    """To the base 2. Comparisons, not clips: a NaN stays a NaN."""
    w = chunk["w"].read()
    if chunk.decay == "log":
        return jnp.where(w < MIN_LOG_DECAY, MIN_LOG_DECAY, w) * LOG2E
    largest = math.log(-MIN_LOG_DECAY)
    return -jnp.exp2(jnp.where(w > largest, largest, w) * LOG2E + math.log2(LOG2E))


def _slope(chunk: Chunk) -> Array | float:
    """The derivative of the log decay to the base e. Where MIN_LOG_DECAY bounds it, the gradient of
    the log decay is 0."""
    return 1.0 if chunk.decay == "log" else chunk["log_decay"].read() * (1 / (UNIT * LOG2E))


def _mirrored(half: int, i: Array, j: Array) -> tuple[Array, Array]:
    """Places that grow with the distance from the middle of the piece of row `i`."""
    mirror = jnp.where((i & half) == 0, -1, 0)
    return i ^ mirror, j ^ mirror


def _between(half: int) -> MaskFn:
    """Whether the token of the column is between the token of the row and the middle of its
    piece."""

    def mask(i: Array, t: Array) -> Array:
        row, column = _mirrored(half, i, t)
        return (column < row) & ((i ^ t) < half)

    return mask


def _farther(half: int) -> MaskFn:
    """Whether the token of the row is between the token of the column and the middle of its
    piece."""

    def mask(t: Array, i: Array) -> Array:
        row, column = _mirrored(half, t, i)
        return (row < column) & ((i ^ t) < half)

    return mask


def _of_halves(half: int) -> MaskFn:
    """Whether two tokens are in different halves of a piece."""

    def mask(i: Array, j: Array) -> Array:
        return (half <= (i ^ j)) & ((i ^ j) < 2 * half)

    return mask


def _log_decay_of(chunk: Chunk, mask: MaskFn) -> list[Pair]:
    """The product that gives for each token the log decay of those that the mask has in its row."""
    return [(chunk.kept(mask, 1 / UNIT).astype(jnp.float16), chunk["log_decay"])]


def _chosen(chunk: Chunk, mask: MaskFn) -> Array:
    return chunk.kept(mask, 1.0).astype(jnp.bfloat16)


def _r_or_k(chunk: Chunk, half: int) -> Array:
    """r in the second half of each piece, k in the first."""
    return jnp.where(_is_second(chunk, half), chunk["r"].read(), chunk["k"].read())


def _is_second(chunk: Chunk, half: int) -> Array:
    """Whether a token is in the second half of its piece."""
    row, _ = chunk.places()
    return (row & half) != 0


def _stay(chunk: Chunk) -> Array:
    return jnp.exp2(jnp.sum(chunk["log_decay"].read(), axis=0) * (1 / UNIT))


def _bonus(chunk: Chunk) -> Array:
    """r . u k"""
    r, k = chunk["r"].read(), chunk["k"].read()
    return jnp.sum(r * k * in_all_rows(chunk.parameter("u")), axis=1)


def _forward(chunk: Chunk, state: Array) -> Array:
    r, w, k, v, z, ends = (chunk[name] for name in ("r", "w", "k", "v", "z", "ends"))
    chunk["log_decay"].put(_log_decay(chunk) * UNIT)
    start = w  # Arrays of operands that are not read again hold other things.
    start.put(state)
    chunk.commit()
    chunk.write("states", start)
    before, after, factors = chunk.products(
        *(_log_decay_of(chunk, mask) for mask in (below, above, _between(HALVES[0])))
    )
    r_start = (r.read() * jnp.exp2(before)).astype(jnp.bfloat16)
    ends.put(k.read() * jnp.exp2(after))

    pairs = None
    for half in (*HALVES, 1):
        x = _r_or_k(chunk, half)
        if half > 1:
            x *= jnp.exp2(factors)
        x = x.astype(jnp.bfloat16)
        z.put(x)
        chunk.commit()
        more = [_log_decay_of(chunk, _between(half // 2))] if half > 2 else []
        found, *more = chunk.products([(x, z.T)], *more)
        if more:
            (factors,) = more
        found = found.astype(jnp.bfloat16)
        if pairs is not None:
            i, j = chunk.places()
            found = jnp.where((i ^ j) < 2 * half, found, pairs)
        pairs = found

    i, j = chunk.places()
    pairs = jnp.where(j < i, pairs, jnp.zeros_like(pairs))
    y = chunk.product((r_start, start.T), (pairs, v))
    z.put(y + in_all_columns(_bonus(chunk)) * v.read())
    chunk.commit()
    chunk.write("y", z)
    return state * in_all_rows(_stay(chunk)) + chunk.product((v.T, ends))


def _backward(chunk: Chunk, dstate: Array) -> Array:
    r, w, k, v, dy, start = (chunk[name] for name in (*"rwkv", "dy", "states"))
    d, rest, x, z, dlog = (chunk[name] for name in ("d", "rest", "x", "z", "dlog"))
    chunk["log_decay"].put(_log_decay(chunk) * UNIT)
    d.put(dstate)
    rest.put(dstate - d.read())  # so that `dstate` is in no registers for now
    chunk.commit()
    pairs = w  # Arrays of operands that are not read again hold other things: C, and then R.
    found = chunk.product((dy, v.T))
    i, j = chunk.places()
    dbonus = jnp.sum(jnp.where(i == j, found, 0.0), axis=1)
    pairs.put(found)
    found = chunk.product((v, dy.T))
    pairs.put(chunk.kept(below, pairs.read()) + chunk.kept(above, found))

    dr = dk = 0.0
    for half in (*HALVES, 1):
        factors = None
        if half > 1:
            factors = jnp.exp2(chunk.product(*_log_decay_of(chunk, _between(half))))
        scaled = _r_or_k(chunk, half)
        z.put(scaled if factors is None else scaled * factors)
        chunk.commit()
        own = chunk.kept(_of_halves(half), pairs.read()).astype(jnp.bfloat16)
        dz, found = chunk.products([(own, z)], [(z, z.T)])
        pairs.put(jnp.where(_of_halves(half)(*chunk.places()), found, pairs.read()))
        if factors is not None:
            dz *= factors
            x.put(dz * _r_or_k(chunk, half))
        dr += jnp.where(_is_second(chunk, half), dz, 0.0)
        dk += jnp.where(_is_second(chunk, half), 0.0, dz)
        if factors is not None:
            chunk.commit()
            found = chunk.product((_chosen(chunk, _farther(half)), x))
            dlog.put(found if half == HALVES[0] else dlog.read() + found)

    factors = jnp.exp2(chunk.product(*_log_decay_of(chunk, above)))
    z.put(k.read() * factors)
    chunk.commit()
    found = chunk.product((v, d)) * factors
    x.put(found * k.read())
    dk += found
    later = chunk.kept(above, pairs.read()).astype(jnp.bfloat16)
    found = chunk.product((later, dy), (z, d.T))
    v.put(found + in_all_columns(_bonus(chunk)) * dy.read())
    chunk.commit()
    chunk.write("dv", v)
    dlog.put(dlog.read() + chunk.product((_chosen(chunk, below), x)))

    factors = jnp.exp2(chunk.product(*_log_decay_of(chunk, below)))
    z.put(r.read() * factors)
    chunk.commit()
    found = chunk.product((dy, start)) * factors
    x.put(found * r.read())
    dr += found
    dbonus = in_all_columns(dbonus)
    chunk.write_row("du", jnp.sum(dbonus * r.read() * k.read(), axis=0))
    dbonus *= in_all_rows(chunk.parameter("u"))
    dr += dbonus * k.read()
    k.put(dk + dbonus * r.read())
    r.put(dr)
    chunk.commit()
    stay, dstate = _stay(chunk), d.read() + rest.read()
    found = dlog.read() + chunk.product((_chosen(chunk, above), x))
    found += in_all_rows(jnp.sum(dstate * start.read(), axis=0) * stay)
    w.put(found * _slope(chunk))
    chunk.commit()
    for name, y in (("dr", r), ("dw", w), ("dk", k)):
        chunk.write(name, y)
    return dstate * in_all_rows(stay) + chunk.product((dy.T, z))


LOG_DECAY = {"log_decay": jnp.float16}

FORWARD = Kernel(
    _forward,
    dict.fromkeys(("z", "ends"), jnp.bfloat16) | LOG_DECAY,
    stages=2,
    order=FROM_START,
)
BACKWARD = Kernel(
    _backward,
    dict.fromkeys(("d", "rest", "x", "z"), jnp.bfloat16) | LOG_DECAY | {"dlog": jnp.float32},
    stages=1,
    order=FROM_END,
)
