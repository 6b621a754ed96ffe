"""WKV7 in chunks of plain jnp, for any backend, head size and decay.

Inside a block of L tokens the recurrence is solved at once. With P[i, j] = d_{j+1} ... d_i the
decay from token j to token i (a product of factors <= 1, so nothing overflows or is divided by):

    A_ij = a_i . (P[i-1, j] b_j)   B_ij = a_i . (P[i-1, j] k_j)      for j < i
    Q_ij = r_i . (P[i, j] b_j)     R_ij = r_i . (P[i, j] k_j)        for j <= i
    U = (I - A)^-1 (a_i . P[i-1, start] S^T + B V)                   row i of U is S_{i-1} a_i
    Y = r_i . P[i, start] S^T + Q U + R V
    S <- S diag(P[L, start]) + U^T (P[L, j] b_j) + V^T (P[L, j] k_j)
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax import _chunked
from rwkv_jax._decay import decay_factor, decay_products
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, States, Values
from rwkv_jax.wkv7 import reference

step = reference.step


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    return None


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    return "chunks in plain jax.numpy"


def _block(
    options: Options, state: State, *inputs: Array, marks: Marks | None = None
) -> tuple[State, Values]:
    out_dtype = inputs[3].dtype
    d = decay_factor(inputs[1], options.decay)
    r, d, k, v, a, b = (
        jnp.moveaxis(x.astype(jnp.float32), 1, 2) for x in (inputs[0], d, *inputs[2:])
    )
    upto, before, from_start, before_start = decay_products(d, marks)

    def einsum(equation: str, *operands: Array) -> Array:
        return jnp.einsum(equation, *operands, precision=options.precision)

    pairs = "bhik,bhjk,bhijk->bhij"
    z = einsum("bhik,bhvk->bhiv", a * before_start, state)
    z += einsum("bhij,bhjv->bhiv", einsum(pairs, a, k, before), v)
    u = lax.linalg.triangular_solve(
        -einsum(pairs, a, b, before), z, left_side=True, lower=True, unit_diagonal=True
    )
    y = einsum("bhik,bhvk->bhiv", r * from_start, state)
    y += einsum("bhij,bhjv->bhiv", einsum(pairs, r, b, upto), u)
    y += einsum("bhij,bhjv->bhiv", einsum(pairs, r, k, upto), v)
    to_end = upto[:, :, -1]
    state = (
        state * from_start[:, :, -1, None, :]
        + einsum("bhjv,bhjk->bhvk", u, b * to_end)
        + einsum("bhjv,bhjk->bhvk", v, k * to_end)
    )
    return state, jnp.moveaxis(y, 2, 1).astype(out_dtype)


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State, States]:
    block = functools.partial(_block, options)
    return _chunked.forward(
        *(block, initial_state, (r, w, k, v, a, b), (), marks),
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
    a: Keys,
    b: Keys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
) -> tuple[Keys, Keys, Keys, Values, Keys, Keys, State]:
    block = functools.partial(_block, options)
    (dr, dw, dk, dv, da, db), _, dinitial_state = _chunked.backward(
        block, states, dy, dfinal_state, (r, w, k, v, a, b), (), marks
    )
    return dr, dw, dk, dv, da, db, dinitial_state
