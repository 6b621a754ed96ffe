"""Layer normalisation. It computes in float32 and returns the dtype of its input."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax.layers.norm_shift_mix import LAYER_NORM_EPS
from rwkv_jax.models import _parameters


class Norm(NamedTuple):
    """The scale and offset of a normalisation, each [C]."""

    weight: Array
    bias: Array


def init_norm(width: int) -> Norm:
    """A scale of 1 and an offset of 0."""
    return Norm(jnp.ones(width), jnp.zeros(width))


@jax.checkpoint
def layer_norm(params: Norm, x: Float[Array, "*shape C"]) -> Float[Array, "*shape C"]:
    """Layer normalisation over the channels, with scale and offset. The backward pass computes it
    again from `x`: otherwise it would keep arrays of float32."""
    p = _parameters.like(params, x)
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    scale = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    return (wide * scale).astype(x.dtype) * p.weight + p.bias


@jax.custom_jvp
def normalised(
    params: Norm, x: Float[Array, "*shape C"], moments: Float32[Array, "*shape 2"]
) -> Float[Array, "*shape C"]:
    """`layer_norm` of `x` whose mean and 1 / sqrt(variance + eps) are known."""
    p = _parameters.like(params, x)
    mean, scale = moments[..., :1], moments[..., 1:]
    return ((x.astype(jnp.float32) - mean) * scale).astype(x.dtype) * p.weight + p.bias


@normalised.defjvp
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return normalised(*primals), jax.jvp(layer_norm, primals[:2], tangents[:2])[1]


def head_norm(
    params: Norm, x: Float[Array, "*shape H V"], eps: float
) -> Float[Array, "*shape channels"]:
    """Normalisation of each head, then scale and offset of each channel. RWKV-LM has it as a
    `GroupNorm` with a group for each head."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    *shape, heads, size = x.shape
    wide = wide.reshape(*shape, heads * size)
    p = _parameters.like(params, wide)
    return (wide * p.weight + p.bias).astype(x.dtype)
