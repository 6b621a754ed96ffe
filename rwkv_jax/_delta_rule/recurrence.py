"""The recurrence one token at a time, and as a form of WKV7.

With alpha_t = exp(g_t), a token of the delta rule is a token of WKV7 with

    r = scale q     w = g (decay "log")     k' = beta k     a = alpha k     b = -beta k
"""

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._delta_rule.kernels import DeltaKernels
from rwkv_jax._operator import heads
from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._operator.form import Form
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.token_by_token import TokenByToken
from rwkv_jax.wkv7.operator import OPERATOR as WKV7


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """S = S diag(alpha), then S = S + beta (v - S k) k^T, and y = scale S q."""
    q, k, v, g, beta = _floats(inputs)
    s = state["state"] * jnp.exp(_of_channels(g, k))[:, :, None]
    error = beta[..., None] * (v - _apply(s, k))
    s = s + error[..., None] * k[:, :, None]
    y = options.scale_of(q.shape[-1]) * _apply(s, q)
    return y.astype(inputs["v"].dtype), {"state": s}


def _floats(inputs: Arrays) -> tuple[Array, ...]:
    """The inputs in float32, with q and k once for each head of v."""
    q, k, v, g, beta = (inputs[name].astype(jnp.float32) for name in ("q", "k", "v", "g", "beta"))
    q, k = (heads.repeated(x, v.shape[-2]) for x in (q, k))
    return q, k, v, g, beta


def _apply(state: Array, x: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def _of_channels(g: Array, k: Array) -> Array:
    """The log decay of each channel, of a head's where there is one."""
    return jnp.broadcast_to(g[..., None] if g.ndim < k.ndim else g, k.shape)


def as_wkv7(options: Options, inputs: Arrays) -> Arrays:
    """The inputs of WKV7, in the dtype of the values unless nothing may be rounded."""
    q, k, v, g, beta = _floats(inputs)
    g, written = _of_channels(g, k), beta[..., None] * k
    made = {"r": options.scale_of(q.shape[-1]) * q, "w": g, "k": written, "v": v}
    made |= {"a": jnp.exp(g) * k, "b": -written}
    dtype = jnp.float32 if options.exact else inputs["v"].dtype
    return {name: x.astype(dtype) for name, x in made.items()}


def operator(name: str, decay_axes: str) -> Operator:
    """The operator whose `g` has these axes."""
    signature = Signature(
        name,
        inputs={"q": "BTGK", "k": "BTGK", "v": "BTHV", "g": decay_axes, "beta": "BTH"},
        y="v",
        state={"state": "BHVK"},
        identity_token={},
        decays=(),
        float32=frozenset({"g", "beta"}),
    )
    return Operator(
        signature,
        WKV7.transition,
        implementations={
            "ffi": DeltaKernels(WKV7, "ffi", as_wkv7, "log", signature),
            "pallas": Form(WKV7, "pallas", as_wkv7, "log"),
            "xla": Form(WKV7, "xla", as_wkv7, "log"),
            "reference": TokenByToken(signature, step),
        },
    )
