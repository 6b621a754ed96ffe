"""WKV7, one token at a time: the specification that every other implementation agrees with."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from rwkv_jax import _chunked
from rwkv_jax._decay import decay_factor
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._typing import Keys, State, TokenKeys, TokenValues, Values


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    return None


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    return "lax.scan, one token at a time in float32"


def step(
    options: Options,
    platform: str,
    r: TokenKeys,
    w: TokenKeys,
    k: TokenKeys,
    v: TokenValues,
    a: TokenKeys,
    b: TokenKeys,
    state: State,
) -> tuple[TokenValues, State]:
    """S = S diag(d) + (S a) b^T + v k^T, then y = S r."""
    out_dtype = v.dtype
    d = decay_factor(w, options.decay)
    r, k, v, a, b = (x.astype(jnp.float32) for x in (r, k, v, a, b))
    state = (
        state * d[:, :, None, :]
        + _apply(state, a)[..., None] * b[:, :, None, :]
        + v[..., None] * k[:, :, None, :]
    )
    return _apply(state, r).astype(out_dtype), state


def _apply(state: State, x: TokenKeys) -> TokenValues:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State]:
    one = functools.partial(step, options, platform)
    return _chunked.token_by_token(one, initial_state, (r, w, k, v, a, b), marks)
