"""WKV6 in experimental kernels for Hopper GPUs: 64 tokens at once, and their derivative by hand.

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
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._pallas.chunk import (
    LOG2E,
    READS,
    SIZE,
    SQUARE,
    WRITES,
    Chunk,
    MaskFn,
    Pair,
    above,
    below,
    in_all_columns,
    in_all_rows,
    pinned,
    sum_in_all_rows,
)
from rwkv_jax._pallas.lowering import FROM_END, FROM_START
from rwkv_jax._pallas.warpgroup import Kernel
from rwkv_jax._portable.decay import MIN_LOG_DECAY

UNIT = 128
"""Log decays are summed as float16 numbers of 1/128. They have 11 binary digits from
MIN_LOG_DECAY on, which is -36934 units, to -3.3e-7; weaker ones have fewer."""

LEVELS = SIZE.bit_length() - 2
"""The values of h from 32 to 2. They are a loop, since a kernel should be smaller than the cache of
instructions. For h = 1 no tokens are between a token and the middle, and all factors are 1."""


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


def _half(level: Any) -> Any:
    """h of a level, from the largest on."""
    return lax.shift_right_logical(jnp.int32(SIZE // 2), jnp.int32(level))


def _on_one_side(half: Any, i: Array, j: Array, is_before: Array) -> Array:
    """Whether the token j is in the same half of a piece as the token i, and before or else after
    it."""
    start = i & -half
    first = jnp.where(is_before, start, i + 1)
    count = jnp.where(is_before, i, start + half) - first
    # Of unsigned numbers, for which one comparison of each element is enough.
    return (j - first).astype(jnp.uint32) < count.astype(jnp.uint32)


def _between(half: Any) -> MaskFn:
    """Whether the token of the column is between the token of the row and the middle of its
    piece."""
    return lambda i, t: _on_one_side(half, i, t, (i & half) != 0)


def _farther(half: Any) -> MaskFn:
    """Whether the token of the row is between the token of the column and the middle of its
    piece."""
    return lambda t, i: _on_one_side(half, t, i, (t & half) == 0)


def _of_halves(half: Any) -> MaskFn:
    """Whether two tokens are in different halves of a piece."""
    return lambda i, j: ((i ^ j) & -half) == half


def _log_decay_of(chunk: Chunk, mask: MaskFn) -> list[Pair]:
    """The product that gives for each token the log decay of those that the mask has in its row."""
    return [(chunk.kept(mask, 1 / UNIT).astype(jnp.float16), chunk["log_decay"])]


def _chosen(chunk: Chunk, mask: MaskFn) -> Array:
    return chunk.kept(mask, 1.0).astype(jnp.bfloat16)


def _r_or_k(chunk: Chunk, half: Any) -> Array:
    """r in the second half of each piece, k in the first."""
    return jnp.where(_is_second(chunk, half), chunk["r"].read(), chunk["k"].read())


def _is_second(chunk: Chunk, half: Any) -> Array:
    """Whether a token is in the second half of its piece."""
    row, _ = chunk.places()
    return (row & half) != 0


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
    chunk.write(states=start)
    before, after, exponents = chunk.products(
        *(_log_decay_of(chunk, mask) for mask in (below, above, _between(_half(0))))
    )
    r_start = pinned(chunk.of(READS, r.read() * jnp.exp2(before)).astype(jnp.bfloat16))
    ends.put(chunk.of(WRITES, k.read() * jnp.exp2(after)))

    def level(n: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        exponents, pairs = carry
        half = _half(n)
        x = pinned((_r_or_k(chunk, half) * jnp.exp2(exponents)).astype(jnp.bfloat16))
        z.put(x)
        chunk.commit()
        found, exponents = chunk.products([(x, z.T)], _log_decay_of(chunk, _between(_half(n + 1))))
        i, j = chunk.places()
        return exponents, jnp.where((i ^ j) < 2 * half, found.astype(jnp.bfloat16), pairs)

    _, pairs = lax.fori_loop(0, LEVELS, level, (exponents, jnp.zeros_like(r_start)))
    z.put(_r_or_k(chunk, 1))
    chunk.commit()
    found = chunk.product((z, z.T)).astype(jnp.bfloat16)
    i, j = chunk.places()
    pairs = chunk.related(below, jnp.where((i ^ j) < 2, found, pairs))
    y, dstate, stay = chunk.products(
        [(r_start, start.T), (pairs, v)],
        [(v.T, ends)],
        sum_in_all_rows(chunk["log_decay"], 1 / UNIT),
    )
    z.put(y + in_all_columns(_bonus(chunk)) * v.read())
    chunk.commit()
    chunk.write(y=z)
    return chunk.stays(state * jnp.exp2(stay)) + dstate


def _backward(chunk: Chunk, dstate: Array) -> Array:
    r, w, k, v, dy, start = (chunk[name] for name in (*"rwkv", "dy", "states"))
    d, rest, x, z, starts, ends = (chunk[n] for n in ("d", "rest", "x", "z", "starts", "ends"))
    chunk["log_decay"].put(_log_decay(chunk) * UNIT)
    d.put(dstate)
    rest.put(dstate - d.read())  # so that `dstate` is in no registers for now
    chunk.commit()
    pairs = w  # Arrays of operands that are not read again hold other things: C, and then R.
    found, transpose = chunk.products([(dy, v.T)], [(v, dy.T)])
    i, j = chunk.places()
    dbonus = jnp.sum(jnp.where(i == j, found, 0.0), axis=1)
    pairs.put(chunk.related(None, jnp.where(j < i, found, transpose)))
    chunk.write_row("du", jnp.sum(in_all_columns(dbonus) * r.read() * k.read(), axis=0))

    before, dr = chunk.products(_log_decay_of(chunk, below), [(dy, start)])
    before = chunk.of(READS, jnp.exp2(before))
    starts.put(r.read() * before)
    dr = pinned(dr * before)
    z.put(dr * r.read())
    after, dk, stay = chunk.products(
        _log_decay_of(chunk, above), [(v, d)], sum_in_all_rows(chunk["log_decay"], 1 / UNIT)
    )
    after = chunk.of(WRITES, jnp.exp2(after))
    ends.put(k.read() * after)
    dk = pinned(dk * after)
    x.put(dk * k.read())
    dstay = pinned(chunk.stays((d.read() + rest.read()) * start.read() * jnp.exp2(stay)))
    start.put(dstay)
    v.put(dstay - start.read())  # In two parts, since all tokens get its sum.
    chunk.commit()
    all_rows = jnp.ones(SQUARE, jnp.bfloat16)
    dlog, exponents = chunk.products(
        [
            (_chosen(chunk, above), z),
            (_chosen(chunk, below), x),
            (all_rows, start),
            (all_rows, v),
        ],
        _log_decay_of(chunk, _between(_half(0))),
    )

    def products_of_halves(half: Any) -> Array:
        """C_h Z_h, for Z_h in `z`. P_h takes the place of C_h."""
        chunk.commit()
        own = pinned(chunk.kept(_of_halves(half), pairs.read())).astype(jnp.bfloat16)
        dz, found = chunk.products([(own, z)], [(z, z.T)])
        pairs.put(jnp.where(_of_halves(half)(*chunk.places()), found, pairs.read()))
        return dz

    def with_share(half: Any, dr: Array, dk: Array, dz: Array) -> tuple[Array, Array]:
        """`dr` and `dk`, with `dz` added to the one whose rows Z_h has."""
        of_r = jnp.where(_is_second(chunk, half), 1.0, 0.0)
        return dr + dz * of_r, dk + dz * (1.0 - of_r)

    def level(n: Any, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        dr, dk, dlog, exponents = carry
        half, factors = _half(n), jnp.exp2(exponents)
        z.put(_r_or_k(chunk, half) * factors)
        dz = pinned(products_of_halves(half) * factors)
        x.put(dz * _r_or_k(chunk, half))
        dr, dk = with_share(half, dr, dk, dz)
        chunk.commit()
        found, exponents = chunk.products(
            [(_chosen(chunk, _farther(half)), x)],
            _log_decay_of(chunk, _between(_half(n + 1))),
        )
        return dr, dk, dlog + found, exponents

    dr, dk, dlog, _ = lax.fori_loop(0, LEVELS, level, (dr, dk, dlog, exponents))
    z.put(_r_or_k(chunk, 1))
    dr, dk = with_share(1, dr, dk, products_of_halves(1))
    later = pinned(chunk.related(above, pairs.read())).astype(jnp.bfloat16)
    w.put(chunk.there(dlog * _slope(chunk)))
    bonus = in_all_columns(_bonus(chunk))
    dbonus = in_all_columns(dbonus) * in_all_rows(chunk.parameter("u"))
    dr += dbonus * k.read()
    k.put(dk + dbonus * r.read())
    r.put(dr)
    dv, dstate, stay = chunk.products(
        [(later, dy), (ends, d.T)], [(dy.T, starts)], sum_in_all_rows(chunk["log_decay"], 1 / UNIT)
    )
    v.put(dv + bonus * dy.read())
    chunk.commit()
    chunk.write(dr=r, dw=w, dk=k, dv=v)
    return chunk.stays((d.read() + rest.read()) * jnp.exp2(stay)) + dstate


LOG_DECAY = {"log_decay": jnp.float16}

FORWARD = Kernel(
    _forward,
    dict.fromkeys(("z", "ends"), jnp.bfloat16) | LOG_DECAY,
    stages=2,
    order=FROM_START,
)
BACKWARD = Kernel(
    _backward,
    dict.fromkeys(("d", "rest", "x", "z", "starts", "ends"), jnp.bfloat16) | LOG_DECAY,
    stages=1,
    order=FROM_END,
)
