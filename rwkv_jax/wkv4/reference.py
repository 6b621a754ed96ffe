"""WKV4, one token at a time: the specification that every other implementation agrees with."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from rwkv_jax import _chunked
from rwkv_jax._decay import unbounded_log_decay
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks

Token: TypeAlias = Float[Array, "B C"]
Tokens: TypeAlias = Float[Array, "B T C"]
Part: TypeAlias = Float32[Array, "B C"]

NOTHING = -1e38
"""The `log_max` of a state without tokens."""


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    return None


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    return "lax.scan, one token at a time in float32"


def step(
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Token,
    v: Token,
    num: Part,
    den: Part,
    log_max: Part,
) -> tuple[Token, Part, Part, Part]:
    """y = (num + e^(u + k) v) / (den + e^(u + k)), then num = e^w num + e^k v and den = e^w den +
    e^k, where num and den stand for these times e^log_max, the largest weight so far."""
    y = read(u, k, v, num, den, log_max)
    w = unbounded_log_decay(w, options.decay)
    k32, v32 = k.astype(jnp.float32), v.astype(jnp.float32)
    num, den, log_max = add((num, den, log_max), w, (v32, jnp.ones_like(v32), k32))
    return y, num, den, log_max


def read(u: Array, k: Array, v: Array, num: Array, den: Array, log_max: Array) -> Array:
    own = u.astype(jnp.float32) + k.astype(jnp.float32)
    largest = jnp.maximum(log_max, own)
    before, now = jnp.exp(log_max - largest), jnp.exp(own - largest)
    y = (before * num + now * v.astype(jnp.float32)) / (before * den + now)
    return y.astype(v.dtype)


def add(state: Sequence[Array], w: Array, added: Sequence[Array]) -> tuple[Array, ...]:
    """The state after a decay of w, plus what is added to it. The exponents are compared with the
    largest as it was rounded, so that over many tokens it does not drift away from the sums."""
    num, den, log_max = state
    more_num, more_den, more_max = added
    largest = jnp.maximum(log_max + w, more_max)
    before, now = jnp.exp((log_max - largest) + w), jnp.exp(more_max - largest)
    return before * num + now * more_num, before * den + now * more_den, largest


def forward(
    options: Options,
    platform: str,
    w: Token,
    u: Token,
    k: Tokens,
    v: Tokens,
    initial_num: Part,
    initial_den: Part,
    initial_log_max: Part,
    marks: Marks | None = None,
) -> tuple[Tokens, Part, Part, Part]:
    def one(k: Array, v: Array, state: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
        y, *after = step(options, platform, w, u, k, v, *state)
        return y, tuple(after)

    start = initial_num, initial_den, initial_log_max
    y, (num, den, log_max) = _chunked.token_by_token(one, start, (k, v), marks, (0.0, 0.0, NOTHING))
    return y, num, den, log_max
