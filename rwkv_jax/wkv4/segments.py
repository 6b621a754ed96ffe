"""A run of tokens as one map of the state, as `wkv7.segments`: they decay the sums before them and
add their own."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array

from rwkv_jax import _packing
from rwkv_jax._decay import unbounded_log_decay
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._partition import alike
from rwkv_jax.wkv4.reference import NOTHING, Token, Tokens, add

AXES = {"log_decay": "BC", "num": "BC", "den": "BC", "log_max": "BC"}
"""Of a map: the log decay of all tokens together, and the state after them from that of none."""

Map: TypeAlias = tuple[Array, ...]


def summarize(
    forward: Callable[..., Any],
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Tokens,
    v: Tokens,
    marks: Marks | None = None,
) -> Map:
    none = jnp.zeros((k.shape[0], k.shape[2]))
    axes = ["BC", "BC", "BTC", "BTC", "BC", "BC", "BC"]
    operands = alike(axes, w, u, k, v, none, none, none + NOTHING)
    more = () if marks is None else (marks,)
    _, *added = forward(options, platform, *operands, *more)
    log_decay = unbounded_log_decay(w, options.decay)
    if marks is None:
        total = k.shape[1] * log_decay
    else:
        total = _packing.total(marks, jnp.broadcast_to(log_decay[:, None], k.shape))
    return total, *added[:3]


def apply(segment: Map, state: tuple[Array, ...]) -> tuple[Array, ...]:
    log_decay, *added = segment
    return add(state, log_decay, added)


def combine(first: Map, second: Map) -> Map:
    return first[0] + second[0], *apply(second, first[1:])
