"""WKV7, one token at a time: the specification that every other implementation agrees with."""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._portable.decay import decay_factor
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.wkv7.signature import SIGNATURE


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """S = S diag(d) + (S a) b^T + v k^T, then y = S r."""
    d = decay_factor(inputs["w"], options.decay)
    r, k, v, a, b = (inputs[name].astype(jnp.float32) for name in "rkvab")
    s = state["state"]
    s = (
        s * d[:, :, None, :]
        + _apply(s, a)[..., None] * b[:, :, None, :]
        + v[..., None] * k[:, :, None, :]
    )
    return _apply(s, r).astype(inputs["v"].dtype), {"state": s}


def _apply(state: Array, x: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


IMPLEMENTATION = TokenByToken(SIGNATURE, step)
