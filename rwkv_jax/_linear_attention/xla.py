"""WKV5 and WKV6 in chunks of plain jnp, for any backend, head size and decay.

With P[i, j] = d_{j+1} ... d_i the decay from token j to token i (a product of factors <= 1, so
nothing overflows or is divided by), a tile of L tokens is

    R_ij = r_i . (P[i-1, j] k_j)  for j < i,    R_ii = r_i . (u k_i)
    Y = r_i . P[i-1, start] S^T + R V
    S <- S diag(P[L, start]) + V^T (P[L, j] k_j)
"""

import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.decay import decay_factor, decay_products


def tile(
    options: Options, state: Arrays, inputs: Arrays, marks: Array | None
) -> tuple[Arrays, Array]:
    """`w` is that of each token, or the same for all, [B, H, K]."""
    w = inputs["w"]
    d = decay_factor(w if w.ndim == 4 else w[:, None], options.decay)
    r, k, v = (jnp.moveaxis(inputs[name].astype(jnp.float32), 1, 2) for name in "rkv")
    d = jnp.broadcast_to(jnp.moveaxis(d, 1, 2), r.shape)
    u = inputs["u"].astype(jnp.float32)[:, :, None, :]
    upto, before, from_start, before_start = decay_products(d, marks)

    def einsum(equation: str, *operands: Array) -> Array:
        return jnp.einsum(equation, *operands, precision=options.precision)

    s = state["state"]
    y = einsum("bhik,bhvk->bhiv", r * before_start, s)
    y += einsum("bhij,bhjv->bhiv", einsum("bhik,bhjk,bhijk->bhij", r, k, before), v)
    y += jnp.sum(r * u * k, axis=-1, keepdims=True) * v
    s = s * from_start[:, :, -1, None, :]
    s += einsum("bhjv,bhjk->bhvk", v, k * upto[:, :, -1])
    return {"state": s}, jnp.moveaxis(y, 2, 1).astype(inputs["v"].dtype)
