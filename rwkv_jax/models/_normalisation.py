"""Normalisations. Each computes in float32 and returns the dtype of its input."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from rwkv_jax.models import _parameters

LAYER_NORM_EPS = 1e-5
UNIT_LENGTH_EPS = 1e-12


class Norm(NamedTuple):
    """The scale and offset of a normalisation, each [C]."""

    weight: Array
    bias: Array


def init_norm(width: int) -> Norm:
    """A scale of 1 and an offset of 0."""
    return Norm(jnp.ones(width), jnp.zeros(width))


def layer_norm(params: Norm, x: Float[Array, "*shape C"]) -> Float[Array, "*shape C"]:
    """Layer normalisation over the channels, with scale and offset."""
    p = _parameters.like(params, x)
    return standardise(x, LAYER_NORM_EPS) * p.weight + p.bias


def standardise(x: Float[Array, "*shape"], eps: float) -> Float[Array, "*shape"]:
    """`x` with zero mean and unit variance over the last axis; `eps` is added to the variance."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)).astype(x.dtype)


def unit_length(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """`x` with a Euclidean norm of 1 over the last axis, or less where the norm is nearly 0."""
    wide = x.astype(jnp.float32)
    square = (wide * wide).sum(-1, keepdims=True)
    return (wide * lax.rsqrt(jnp.maximum(square, UNIT_LENGTH_EPS**2))).astype(x.dtype)
