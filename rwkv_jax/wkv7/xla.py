"""WKV7 in chunks of plain jnp, for any backend, head size and decay.

Inside a tile of L tokens the recurrence is solved at once. With P[i, j] = d_{j+1} ... d_i the
decay from token j to token i (a product of factors <= 1, so nothing overflows or is divided by):

    A_ij = a_i . (P[i-1, j] b_j)   B_ij = a_i . (P[i-1, j] k_j)      for j < i
    Q_ij = r_i . (P[i, j] b_j)     R_ij = r_i . (P[i, j] k_j)        for j <= i
    U = (I - A)^-1 (a_i . P[i-1, start] S^T + B V)                   row i of U is S_{i-1} a_i
    Y = r_i . P[i, start] S^T + Q U + R V
    S <- S diag(P[L, start]) + U^T (P[L, j] b_j) + V^T (P[L, j] k_j)
"""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.chunked import Chunked
from rwkv_jax._portable.decay import decay_factor, decay_products
from rwkv_jax.wkv7 import reference
from rwkv_jax.wkv7.signature import SIGNATURE


def tile(
    options: Options, state: Arrays, inputs: Arrays, marks: Array | None
) -> tuple[Arrays, Array]:
    float32 = {name: inputs[name].astype(jnp.float32) for name in "rkvab"}
    float32["w"] = decay_factor(inputs["w"], options.decay)
    r, d, k, v, a, b = (jnp.moveaxis(float32[name], 1, 2) for name in "rwkvab")
    upto, before, from_start, before_start = decay_products(d, marks)

    def einsum(equation: str, *operands: Array) -> Array:
        return jnp.einsum(equation, *operands, precision=options.precision)

    s = state["state"]
    pairs = "bhik,bhjk,bhijk->bhij"
    z = einsum("bhik,bhvk->bhiv", a * before_start, s)
    z += einsum("bhij,bhjv->bhiv", einsum(pairs, a, k, before), v)
    u = lax.linalg.triangular_solve(
        -einsum(pairs, a, b, before), z, left_side=True, lower=True, unit_diagonal=True
    )
    y = einsum("bhik,bhvk->bhiv", r * from_start, s)
    y += einsum("bhij,bhjv->bhiv", einsum(pairs, r, b, upto), u)
    y += einsum("bhij,bhjv->bhiv", einsum(pairs, r, k, upto), v)
    to_end = upto[:, :, -1]
    s = (
        s * from_start[:, :, -1, None, :]
        + einsum("bhjv,bhjk->bhvk", u, b * to_end)
        + einsum("bhjv,bhjk->bhvk", v, k * to_end)
    )
    return {"state": s}, jnp.moveaxis(y, 2, 1).astype(inputs["v"].dtype)


IMPLEMENTATION = Chunked(SIGNATURE, tile, reference.IMPLEMENTATION)
