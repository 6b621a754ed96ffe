"""A run of tokens as one map of the state: what splits a sequence into parts, over devices too.

The tokens of a segment take the state S [V, K] of a head to S M + D, where D [V, K] is the run from
S = 0 and M [K, K] the run from S = I with v = 0. Maps compose, so that each part of a sequence can
be summarized on its own, the states between the parts found from the summaries alone, and then all
parts computed at once, each from its own state.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._decay import Decay
from rwkv_jax._typing import Operand
from rwkv_jax.wkv7 import wkv7


class Segment(NamedTuple):
    """`factor` M [B, H, K, K] and `added` D [B, H, V, K], both float32."""

    factor: Array
    added: Array


def summarize(
    w: Operand,
    k: Operand,
    v: Operand,
    a: Operand,
    b: Operand,
    *,
    decay: Decay = "log",
    precision: lax.PrecisionLike = None,
    implementation: str | None = None,
) -> Segment:
    """The map of all tokens given; arguments and derivatives are those of `wkv7`."""
    batch, _, heads, size = k.shape

    def run(v: Operand, start: Array) -> Array:
        _, end = wkv7(
            *(k, w, k, v, a, b, start),
            decay=decay,
            precision=precision,
            implementation=implementation,
        )
        return end

    identity = jnp.broadcast_to(jnp.eye(size), (batch, heads, size, size))
    return Segment(
        factor=run(jnp.zeros_like(k), identity),
        added=run(v, jnp.zeros((batch, heads, v.shape[-1], size))),
    )


def apply(segment: Segment, state: Operand) -> Array:
    """The state after a segment, S M + D, from the state before it."""
    return jnp.matmul(state, segment.factor, precision=lax.Precision.HIGHEST) + segment.added


def combine(first: Segment, second: Segment) -> Segment:
    """The map of two segments, one after the other; associative, and it broadcasts."""
    factor = jnp.matmul(first.factor, second.factor, precision=lax.Precision.HIGHEST)
    return Segment(factor, apply(second, first.added))
