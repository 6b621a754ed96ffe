"""WKV7 in experimental kernels for Hopper GPUs: 64 tokens at once, and their derivative by hand.

G is the sum of the log decays of a chunk up to a token and with it, G' without it. S is the state
before the chunk, tril the part of a matrix on and below the diagonal, and tril' that below it.

    A~ = a exp(G')    R~ = r exp(G)    B~ = b exp(-G)    K~ = k exp(-G)
    M = (I - tril'(A~ B~^T))^-1
    U = M (A~ S^T + tril'(A~ K~^T) V)
    Y = R~ S^T + tril(R~ B~^T) U + tril(R~ K~^T) V
    S_after = (S + U^T B~ + V^T K~) diag(exp(G_end))

With bounded decays exp(-G) is at most exp(64 exp(-1/2)) = 7.3e16, which bfloat16 has.

The derivative, with D for the gradient of the state after the chunk times diag(exp(G_end)):

    Z = M^T (tril(R~ B~^T)^T dY + B~ D^T)                    the gradient of what M multiplies
    dV = tril(R~ K~^T)^T dY + K~ D^T + tril'(A~ K~^T)^T Z
    dS = D + dY^T R~ + Z^T A~
    dR~ = dY S + tril(dY U^T) B~ + tril(dY V^T) K~
    dA~ = Z S + tril'(Z U^T) B~ + tril'(Z V^T) K~
    dB~ = U D + tril(dY U^T)^T R~ + tril'(Z U^T)^T A~
    dK~ = V D + tril(dY V^T)^T R~ + tril'(Z V^T)^T A~
    dG = R~ dR~ + A~ dA~ - B~ dB~ - K~ dK~
    dG_end = the sums over the rows of D (S + U^T B~ + V^T K~)

The gradient of a log decay is the sum of dG over its token and all later ones, without the A~ dA~
of its own token, and of dG_end.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._pallas.chunk import (
    LOG2E,
    READS,
    SQUARE,
    WRITES,
    Chunk,
    Pair,
    Shared,
    Triangle,
    above,
    below,
    chosen,
    in_all_rows,
    inverse,
    not_above,
    not_below,
    pinned,
    sum_in_all_rows,
)
from rwkv_jax._pallas.lowering import FROM_END, FROM_START
from rwkv_jax._pallas.warpgroup import Kernel
from rwkv_jax._portable.decay import SIGMOID_SCALE

UNIT = 1024
"""Log decays are summed as float16 numbers of 1/1024, which have 11 binary digits also where a
decay is weak; those of bfloat16 are 8."""


def _share(w: Shared) -> Array:
    return 1.0 / (1.0 + jnp.exp2(w.read() * -LOG2E))


def _put_log_decay(chunk: Chunk) -> None:
    chunk["log_decay"].put((-UNIT * SIGMOID_SCALE * LOG2E) * _share(chunk["w"]))


def _log_decay(chunk: Chunk) -> Array:
    return chunk["log_decay"].read() * (1 / UNIT)


def _log_decay_until(chunk: Chunk) -> list[Pair]:
    """The product that gives G."""
    return [(chunk.kept(not_above, 1 / UNIT).astype(jnp.float16), chunk["log_decay"])]


def _pairs(chunk: Chunk, part: Triangle, x: Array) -> Array:
    return pinned(chunk.related(part, x)).astype(jnp.bfloat16)


def _forward(chunk: Chunk, state: Array) -> Array:
    w, a, r, k, b, v = (chunk[name] for name in "warkbv")
    _put_log_decay(chunk)
    chunk.commit()
    until, own = chunk.product(*_log_decay_until(chunk)), _log_decay(chunk)
    inverse_decay = jnp.exp2(-until)
    a_rows = (a.read() * jnp.exp2(until - own)).astype(jnp.bfloat16)
    r_rows = (r.read() * jnp.exp2(until)).astype(jnp.bfloat16)
    b.put(b.read() * inverse_decay)
    k.put(k.read() * inverse_decay)
    before = a  # Arrays of operands that are in registers now hold other things.
    before.put(state)
    chunk.commit()
    chunk.write(states=before)

    a_b, a_k = chunk.products([(a_rows, b.T)], [(a_rows, k.T)])
    a_b, a_k = chunk.related(below, a_b), _pairs(chunk, below, a_k)
    m = inverse(chunk, a_b, r, w).astype(jnp.bfloat16)
    found, r_b, r_k = chunk.products(
        [(a_rows, before.T, READS), (a_k, v)], [(r_rows, b.T)], [(r_rows, k.T)]
    )
    w.put(found)
    chunk.commit()
    u, y = r, w
    r_b, r_k = (_pairs(chunk, not_above, x) for x in (r_b, r_k))
    u.put(chunk.product((m, w)))
    chunk.put_of(WRITES, b, k)
    chunk.commit()
    found, state, end = chunk.products(
        [(r_rows, before.T, READS), (r_k, v), (r_b, u)],
        [chunk.stays(state), (u.T, b), (v.T, k)],
        sum_in_all_rows(chunk["log_decay"], 1 / UNIT),
    )
    y.put(found)
    chunk.commit()
    chunk.write(y=y)
    return state * jnp.exp2(end)


def _backward(chunk: Chunk, dstate: Array) -> Array:
    r, w, k, v, a, b, dy, before = (chunk[name] for name in (*"rwkvab", "dy", "states"))
    d, u, z, x = (chunk[name] for name in ("d", "u", "z", "x"))
    _put_log_decay(chunk)
    chunk.commit()
    until, end = chunk.products(
        _log_decay_until(chunk), sum_in_all_rows(chunk["log_decay"], 1 / UNIT)
    )
    dstate *= jnp.exp2(end)
    d.put(dstate)
    # What `d` lacks of `dstate`, which would take twice the registers until the end of the chunk.
    rest = pinned((dstate - d.read()).astype(jnp.bfloat16))
    a.put(a.read() * jnp.exp2(until - _log_decay(chunk)))
    r.put(r.read() * jnp.exp2(until))
    inverse_decay = jnp.exp2(-until)
    b.put(b.read() * inverse_decay)
    k.put(k.read() * inverse_decay)
    chunk.commit()

    a_b, a_k, b_r, found, dz = chunk.products(
        *([(a, b.T)], [(a, k.T)], [(b, r.T)], [(a, before.T)], [(b, d.T)])
    )
    a_b, a_k, b_r = (
        chunk.related(below, a_b),
        _pairs(chunk, below, a_k),
        _pairs(chunk, not_below, b_r),
    )
    found, dz = chunk.products(
        [chunk.of(READS, found), (a_k, v)], [chunk.of(WRITES, dz), (b_r, dy)]
    )
    u.put(found)
    dz = pinned(dz.astype(jnp.bfloat16))
    x.put(inverse(chunk, a_b, z, x))
    z.put(dz)
    chunk.commit()
    found, dz = chunk.products([(x, u)], [(x.T, z)])
    u.put(found)
    z.put(dz)
    chunk.commit()

    k_r, k_a, dv = chunk.products([(k, r.T)], [(k, a.T)], [(k, d.T)])
    k_r, k_a = _pairs(chunk, not_below, k_r), _pairs(chunk, above, k_a)
    dend = chunk.stays(d.read() * before.read())
    x.put(chunk.product(chunk.of(WRITES, dv), (k_r, dy), (k_a, z)))
    chunk.commit()
    chunk.write(dv=x)

    def of_reads(n: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """dr and, where n is 1, da."""
        y, rows, to = chosen(n, dy, z), chosen(n, r, a), chosen(n, x, before)
        y_u, y_v, found = chunk.products([(y, u.T)], [(y, v.T)], [(y, before)])
        y_u, y_v = (_pairs(chunk, Triangle(False, 1 - n), y) for y in (y_u, y_v))
        found, until = chunk.products(
            [chunk.of(READS, found), (y_u, b), (y_v, k)], _log_decay_until(chunk)
        )
        chunk.wait()  # for dv to be read
        to.put(found * jnp.exp2(until - n * _log_decay(chunk)))
        own = found * rows.read()
        return sums[0] + own, own

    zeros = jnp.zeros(SQUARE, jnp.float32)
    duntil, dbefore = lax.fori_loop(0, 2, of_reads, (zeros, zeros))

    def of_writes(n: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        """db and, where n is 1, dk."""
        duntil, dend = sums
        y, rows = chosen(n, u, v), chosen(n, b, k)
        y_r, y_a, found = chunk.products([(y, dy.T)], [(y, z.T)], [(y, d)])
        y_r, y_a = _pairs(chunk, not_below, y_r), _pairs(chunk, above, y_a)
        found = chunk.of(WRITES, found)
        dend += found * rows.read()
        found, until = chunk.products([found, (y_r, r), (y_a, a)], _log_decay_until(chunk))
        duntil -= found * rows.read()
        y.put(found * jnp.exp2(-until))
        return duntil, dend

    duntil, dend = lax.fori_loop(0, 2, of_writes, (duntil, dend))
    dend = jnp.sum(dend, axis=0)

    # In two parts, since the sums of `duntil` are small differences of large numbers.
    k.put(duntil)
    b.put(duntil - k.read())
    chunk.put_of(READS, r, a)
    chunk.commit()
    chunk.write(dr=x, da=before, db=u, dk=v)
    later = chunk.related(not_below, jnp.ones(SQUARE, jnp.float32)).astype(jnp.bfloat16)
    dlog = chunk.of(WRITES, in_all_rows(dend)) - dbefore
    dstate = chunk.stays(d.read() + rest.astype(jnp.float32))
    dlog, dstate = chunk.products([dlog, (later, k), (later, b)], [dstate, (dy.T, r), (z.T, a)])
    share = _share(w)
    d.put(dlog * (-SIGMOID_SCALE * share * (1.0 - share)))
    chunk.commit()
    chunk.write(dw=d)
    return dstate


LOG_DECAY = {"log_decay": jnp.float16}

FORWARD = Kernel(_forward, LOG_DECAY, stages=2, order=FROM_START)
BACKWARD = Kernel(
    _backward, dict.fromkeys("duzx", jnp.bfloat16) | LOG_DECAY, stages=1, order=FROM_END
)
