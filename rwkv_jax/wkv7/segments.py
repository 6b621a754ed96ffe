"""A run of tokens as one map of the state: what splits a sequence into parts.

The tokens of a segment take the state S [V, K] of a head to S M + D, where D [V, K] is the run from
S = 0 and M [K, K] the run from S = I with v = 0. Maps compose, so that each part of a sequence can
be summarized on its own, the states between the parts found from the summaries alone, and then all
parts computed at once, each from its own state.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._partition import alike
from rwkv_jax._typing import Keys, Values

AXES = {"factor": "BHLK", "added": "BHVK"}
"""Of a map, M and D, both in float32. L is K."""

Map: TypeAlias = tuple[Array, Array]


def summarize(
    forward: Callable[..., Any],
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    marks: Marks | None = None,
) -> Map:
    """The map of all tokens, by the forward pass of an implementation."""
    batch, _, heads, size = k.shape
    more = () if marks is None else (marks,)

    def run(v: Values, start: Array) -> Array:
        operands = alike(["BTHK"] * 6 + ["BHVK"], r, w, k, v, a, b, start)
        _, end, *_ = forward(options, platform, *operands, *more)
        return end

    identity = jnp.broadcast_to(jnp.eye(size), (batch, heads, size, size))
    none = jnp.zeros((batch, heads, v.shape[-1], size))
    return run(jnp.zeros_like(k), identity), run(v, none)


def apply(segment: Map, state: tuple[Array]) -> tuple[Array]:
    """The state after a segment, S M + D, from the state before it; broadcasts."""
    factor, added = segment
    return (jnp.matmul(state[0], factor, precision=lax.Precision.HIGHEST) + added,)


def combine(first: Map, second: Map) -> Map:
    """The map of two segments, one after the other."""
    factor = jnp.matmul(first[0], second[0], precision=lax.Precision.HIGHEST)
    return factor, *apply(second, first[1:])
