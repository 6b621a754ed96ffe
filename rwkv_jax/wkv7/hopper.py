"""WKV7 in kernels for Hopper GPUs: 64 tokens at once, and their derivative by hand.

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

import jax.numpy as jnp
from jax import Array

from rwkv_jax._pallas.lowering import FROM_END, FROM_START
from rwkv_jax._pallas.warpgroup import (
    Chunk,
    Kernel,
    Shared,
    above,
    below,
    in_all_rows,
    inverse,
    not_above,
    not_below,
)
from rwkv_jax._portable.decay import SIGMOID_SCALE

LOG2E = 1.4426950408889634
"""Exponents are to the base 2 here, for which GPUs have an instruction."""

UNIT = 1024
"""Log decays are summed as float16 numbers of 1/1024, which have 11 binary digits also where a
decay is weak; those of bfloat16 are 8."""


def _share(w: Shared) -> Array:
    return 1.0 / (1.0 + jnp.exp2(w.read() * -LOG2E))


def _put_log_decay(chunk: Chunk) -> None:
    chunk["log_decay"].put((-UNIT * SIGMOID_SCALE * LOG2E) * _share(chunk["w"]))


def _log_decay(chunk: Chunk) -> Array:
    return chunk["log_decay"].read() * (1 / UNIT)


def _log_decay_until(chunk: Chunk) -> Array:
    """G."""
    units = chunk.kept(not_above, 1 / UNIT).astype(jnp.float16)
    return chunk.product((units, chunk["log_decay"]))


def _pairs(chunk: Chunk, mask: object, x: Array | Shared, y: Shared) -> Array:
    return chunk.kept(mask, chunk.product((x, y))).astype(jnp.bfloat16)


def _forward(chunk: Chunk, state: Array) -> Array:
    w, a, r, k, b, v = (chunk[name] for name in "warkbv")
    _put_log_decay(chunk)
    chunk.commit()
    until, own = _log_decay_until(chunk), _log_decay(chunk)
    stay, inverse_decay = jnp.exp2(jnp.sum(own, axis=0)), jnp.exp2(-until)
    a_rows = (a.read() * jnp.exp2(until - own)).astype(jnp.bfloat16)
    r_rows = (r.read() * jnp.exp2(until)).astype(jnp.bfloat16)
    b.put(b.read() * inverse_decay)
    k.put(k.read() * inverse_decay)
    before = a  # Arrays of operands that are in registers now hold other things.
    before.put(state)
    chunk.commit()
    chunk.write("states", before)

    a_b = chunk.kept(below, chunk.product((a_rows, b.T)))
    m = inverse(chunk, a_b, w).astype(jnp.bfloat16)
    a_k = _pairs(chunk, below, a_rows, k.T)
    w.put(chunk.product((a_rows, before.T), (a_k, v)))
    chunk.commit()
    u, y = r, w
    u.put(chunk.product((m, w)))
    chunk.commit()
    r_b, r_k = (_pairs(chunk, not_above, r_rows, x.T) for x in (b, k))
    y.put(chunk.product((r_rows, before.T), (r_k, v), (r_b, u)))
    chunk.commit()
    chunk.write("y", y)
    state += chunk.product((u.T, b), (v.T, k))
    return state * in_all_rows(stay)


def _backward(chunk: Chunk, dstate: Array) -> Array:
    r, w, k, v, a, b, dy, before = (chunk[name] for name in (*"rwkvab", "dy", "states"))
    d, u, z, x = (chunk[name] for name in ("d", "u", "z", "x"))
    _put_log_decay(chunk)
    chunk.commit()
    until, own = _log_decay_until(chunk), _log_decay(chunk)
    stay, inverse_decay = jnp.exp2(jnp.sum(own, axis=0)), jnp.exp2(-until)
    a.put(a.read() * jnp.exp2(until - own))
    r.put(r.read() * jnp.exp2(until))
    b.put(b.read() * inverse_decay)
    k.put(k.read() * inverse_decay)
    dstate *= in_all_rows(stay)
    d.put(dstate)
    chunk.commit()
    dend = jnp.sum(dstate * before.read(), axis=0)

    m = inverse(chunk, chunk.kept(below, chunk.product((a, b.T))), x)
    a_k = _pairs(chunk, below, a, k.T)
    z.put(chunk.product((a, before.T), (a_k, v)))
    x.put(m)
    chunk.commit()
    u.put(chunk.product((x, z)))

    b_r = _pairs(chunk, not_below, b, r.T)
    z.put(chunk.product((b_r, dy), (b, d.T)))
    chunk.commit()
    z.put(chunk.product((x.T, z)))
    chunk.commit()
    k_r = _pairs(chunk, not_below, k, r.T)
    k_a = _pairs(chunk, above, k, a.T)
    x.put(chunk.product((k_r, dy), (k, d.T), (k_a, z)))
    chunk.commit()
    chunk.write("dv", x)
    dstate += chunk.product((dy.T, r), (z.T, a))

    until = _log_decay_until(chunk)
    y_u, y_v = (_pairs(chunk, not_above, dy, y.T) for y in (u, v))
    found = chunk.product((dy, before), (y_u, b), (y_v, k))
    duntil = found * r.read()
    chunk.wait()  # for dv to be read
    x.put(found * jnp.exp2(until))
    z_u, z_v = (_pairs(chunk, below, z, y.T) for y in (u, v))
    found = chunk.product((z, before), (z_u, b), (z_v, k))
    dbefore = found * a.read()
    duntil += dbefore
    before.put(found * jnp.exp2(until - _log_decay(chunk)))
    inverse_decay = jnp.exp2(-until)
    for y, rows in ((u, b), (v, k)):
        scaled = rows.read()
        found = chunk.product((y, d))
        dend += jnp.sum(found * scaled, axis=0)
        y_r = _pairs(chunk, not_below, y, dy.T)
        y_a = _pairs(chunk, above, y, z.T)
        found += chunk.product((y_r, r), (y_a, a))
        duntil -= found * scaled
        y.put(found * inverse_decay)

    # In two parts, since the sums of `duntil` are small differences of large numbers.
    leading = duntil.astype(jnp.bfloat16)
    k.put(leading)
    b.put(duntil - leading.astype(jnp.float32))
    chunk.commit()
    for name, y in (("dr", x), ("da", before), ("db", u), ("dk", v)):
        chunk.write(name, y)
    later = chunk.kept(not_below, 1.0).astype(jnp.bfloat16)
    dlog = chunk.product((later, k), (later, b)) - dbefore
    dlog += in_all_rows(dend)
    share = _share(w)
    d.put(dlog * (-SIGMOID_SCALE * share * (1.0 - share)))
    chunk.commit()
    chunk.write("dw", d)
    return dstate


LOG_DECAY = {"log_decay": jnp.float16}

FORWARD = Kernel(_forward, LOG_DECAY, stages=2, order=FROM_START)
BACKWARD = Kernel(
    _backward, dict.fromkeys("duzx", jnp.bfloat16) | LOG_DECAY, stages=1, order=FROM_END
)
