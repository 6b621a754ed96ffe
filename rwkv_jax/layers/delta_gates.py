"""The gate of the decay and the normalisations of Gated DeltaNet and Kimi Delta Attention.

Each is computed in float32. The backward pass computes it again from its inputs, so that no other
array of float32 is kept.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax._operator import check
from rwkv_jax._typing import Operand

L2_NORM_EPS = 1e-6

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
}


def log_decay(
    x: Float[Operand, "*shape"],
    A_log: Float[Operand, " H"],
    dt_bias: Float[Operand, "H *K"],
    *,
    lower_bound: float | None = None,
) -> Float32[Array, "*shape"]:
    """The log decay `g` of the delta rule, for each token:

        g = -exp(A_log) softplus(x + dt_bias)

    or, with a lower bound, such as -5,

        g = lower_bound sigmoid(exp(A_log) (x + dt_bias))

    in float32. Gated DeltaNet has one `g` for each head, Kimi Delta Attention one for each key
    channel.

    Args:
      x: [..., H] or [..., H, K], of any float dtype.
      A_log: the logarithm of the rate of each head, [H].
      dt_bias: the offset, [H] or [H, K]: the last axes of `x`.
      lower_bound: the least log decay, below 0. If None, there is none.

    Raises:
      TypeError, ValueError: an argument has another type, shape, dtype or value.

    The formulas are those of Qwen3-Next, Kimi Linear and, with a lower bound, GLM-5.3.
    """
    op = "log_decay"
    for name, array in {"x": x, "A_log": A_log, "dt_bias": dt_bias}.items():
        check.array(op, name, array)
        check.dtype(op, name, array)
    if dt_bias.ndim not in (1, 2) or x.shape[-dt_bias.ndim :] != dt_bias.shape:
        raise ValueError(
            f"{op}: dt_bias has shape {dt_bias.shape}; accepted is [H] or [H, K], the last axes of "
            f"x, which has shape {x.shape}"
        )
    if A_log.shape != dt_bias.shape[:1]:
        raise ValueError(
            f"{op}: A_log has shape {A_log.shape}; accepted is [H] = {dt_bias.shape[:1]}"
        )
    if lower_bound is not None and check.real(op, "lower_bound", lower_bound) >= 0:
        raise ValueError(f"{op}: lower_bound is {lower_bound}; accepted is a number below 0")
    return _log_decay(lower_bound, x, A_log, dt_bias)


@functools.partial(jax.checkpoint, static_argnums=0)
def _log_decay(lower_bound: float | None, x: Array, A_log: Array, dt_bias: Array) -> Array:
    x, A_log, dt_bias = (z.astype(jnp.float32) for z in (x, A_log, dt_bias))
    rate = jnp.exp(A_log).reshape(A_log.shape + (1,) * (dt_bias.ndim - 1))
    rate, shifted = _with_rank(rate, x.ndim), x + _with_rank(dt_bias, x.ndim)
    if lower_bound is None:
        return -rate * jax.nn.softplus(shifted)
    return lower_bound * jax.nn.sigmoid(rate * shifted)


@jax.checkpoint
def l2_norm(x: Float[Operand, "*shape K"]) -> Float[Array, "*shape K"]:
    """Vectors of unit length, x / sqrt(sum(x^2) + 1e-6), in the dtype of `x`. The sum is that of
    the last axis, in float32."""
    wide = jnp.asarray(x, jnp.float32)
    scale = lax.rsqrt((wide * wide).sum(-1, keepdims=True) + L2_NORM_EPS)
    return (wide * scale).astype(x.dtype)


def gated_rms_norm(
    x: Float[Operand, "*shape V"],
    gate: Float[Operand, "*shape V"],
    weight: Float[Operand, " V"],
    *,
    eps: float,
    activation: str,
) -> Float[Array, "*shape V"]:
    """The normalisation of each head of the operator's output, with a gate:

        x / sqrt(mean(x^2) + eps) * weight * activation(gate)

    in float32, rounded once to the dtype of `x`.

    Args:
      x: the output of the operator, [..., V].
      gate: what the activation is applied to.
      weight: the scale of each channel.
      eps: what is added to the mean of the squares.
      activation: "silu", as in Gated DeltaNet, or "sigmoid", as in Kimi Delta Attention.

    Raises:
      TypeError, ValueError: an argument has another type, shape, dtype or value.
    """
    op = "gated_rms_norm"
    for name, array in {"x": x, "gate": gate, "weight": weight}.items():
        check.array(op, name, array)
        check.dtype(op, name, array)
    check.choice(op, "activation", activation, ACTIVATIONS)
    accepted = {"gate": ("that of x", x.shape), "weight": ("[V]", x.shape[-1:])}
    for name, (which, shape) in accepted.items():
        given = np.shape({"gate": gate, "weight": weight}[name])
        if given != shape:
            raise ValueError(f"{op}: {name} has shape {given}; accepted is {which} = {shape}")
    return _gated_rms_norm(eps, activation, x, gate, weight)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _gated_rms_norm(eps: float, activation: str, x: Array, gate: Array, weight: Array) -> Array:
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    wide = wide * _with_rank(weight.astype(jnp.float32), x.ndim)
    return (wide * ACTIVATIONS[activation](gate.astype(jnp.float32))).astype(x.dtype)


def _with_rank(x: Array, rank: int) -> Array:
    """`x` with axes of size 1 in front, because strict rank promotion adds none."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)
