"""WKV6 in chunks of plain jnp, for any backend, head size and decay.

With P[i, j] = d_{j+1} ... d_i the decay from token j to token i (a product of factors <= 1, so
nothing overflows or is divided by), a block of L tokens is

    R_ij = r_i . (P[i-1, j] k_j)  for j < i,    R_ii = r_i . (u k_i)
    Y = r_i . P[i-1, start] S^T + R V
    S <- S diag(P[L, start]) + V^T (P[L, j] k_j)
"""

import functools

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _chunked
from rwkv_jax._decay import decay_factor, decay_products
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, TokenKeys, Values
from rwkv_jax.wkv6 import reference
from rwkv_jax.wkv7 import xla as wkv7

why_not, how = wkv7.why_not, wkv7.how
step = reference.step


def block(
    options: Options,
    state: State,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    *,
    marks: Marks | None = None,
) -> tuple[State, Values]:
    out_dtype = v.dtype
    d = decay_factor(w, options.decay)
    r, d, k, v = (jnp.moveaxis(x.astype(jnp.float32), 1, 2) for x in (r, d, k, v))
    u = u.astype(jnp.float32)[:, :, None, :]
    upto, before, from_start, before_start = decay_products(d, marks)

    def einsum(equation: str, *operands: Array) -> Array:
        return jnp.einsum(equation, *operands, precision=options.precision)

    y = einsum("bhik,bhvk->bhiv", r * before_start, state)
    y += einsum("bhij,bhjv->bhiv", einsum("bhik,bhjk,bhijk->bhij", r, k, before), v)
    y += jnp.sum(r * u * k, axis=-1, keepdims=True) * v
    state = state * from_start[:, :, -1, None, :]
    state += einsum("bhjv,bhjk->bhvk", v, k * upto[:, :, -1])
    return state, jnp.moveaxis(y, 2, 1).astype(out_dtype)


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State, States]:
    run = functools.partial(block, options)
    return _chunked.forward(
        *(run, initial_state, (r, w, k, v), (u,), marks),
        save=options.save,
        save_as=_chunked.states_dtype(options, r.dtype),
    )


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
) -> tuple[Keys, Keys, Keys, Values, TokenKeys, State]:
    run = functools.partial(block, options)
    (dr, dw, dk, dv), (du,), dinitial_state = _chunked.backward(
        run, states, dy, dfinal_state, (r, w, k, v), (u,), marks
    )
    return dr, dw, dk, dv, du, dinitial_state
