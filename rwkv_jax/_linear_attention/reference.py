"""The recurrence that WKV5 and WKV6 have in common, one token at a time."""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.decay import decay_factor


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """y = (S + v (u * k)^T) r, then S = S diag(d) + v k^T."""
    d = decay_factor(inputs["w"], options.decay)
    r, k, v, u = (inputs[name].astype(jnp.float32) for name in "rkvu")
    s = state["state"]
    y = _apply(s + _outer(v, u * k), r)
    return y.astype(inputs["v"].dtype), {"state": s * d[:, :, None, :] + _outer(v, k)}


def _apply(state: Array, x: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def _outer(v: Array, k: Array) -> Array:
    return v[..., None] * k[:, :, None, :]
