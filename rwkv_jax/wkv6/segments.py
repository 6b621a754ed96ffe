"""A run of tokens as one map of the state, as `wkv7.segments`: they take the state S [V, K] of a
head to S diag(d) + D, where d is the product of their decays and D the run from S = 0."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _packing
from rwkv_jax._decay import unbounded_log_decay
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._partition import alike
from rwkv_jax._typing import Keys, TokenKeys, Values

AXES = {"factor": "BHK", "added": "BHVK"}
"""Of a map, d and D, both in float32."""

Map: TypeAlias = tuple[Array, Array]


def summarize(
    forward: Callable[..., Any],
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    marks: Marks | None = None,
) -> Map:
    batch, tokens, heads, size = v.shape
    constant = w.ndim < k.ndim  # that of WKV5 is the same for all tokens
    if not constant:
        (w,) = _packing.cleared(marks, [w])
    log_decay = unbounded_log_decay(w, options.decay)
    more = () if marks is None else (marks,)
    if marks is None:
        total = tokens * log_decay if constant else jnp.sum(log_decay, axis=1)
    else:
        each = jnp.broadcast_to(log_decay[:, None] if constant else log_decay, k.shape)
        total = _packing.total(marks, each)
    none = jnp.zeros((batch, heads, size, k.shape[-1]))
    axes = [*["BTHK"[: w.ndim]] * 4, "BHK", "BHVK"]
    _, added, *_ = forward(options, platform, *alike(axes, r, w, k, v, u, none), *more)
    return jnp.exp(total), added


def apply(segment: Map, state: tuple[Array]) -> tuple[Array]:
    factor, added = segment
    return (state[0] * factor[..., None, :] + added,)


def combine(first: Map, second: Map) -> Map:
    return first[0] * second[0], *apply(second, first[1:])
