"""WKV6, one token at a time: the specification that every other implementation agrees with."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

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
    u: TokenKeys,
    state: State,
) -> tuple[TokenValues, State]:
    """y = (S + v (u * k)^T) r, then S = S diag(d) + v k^T."""
    out_dtype = v.dtype
    d = decay_factor(w, options.decay)
    r, k, v, u = (x.astype(jnp.float32) for x in (r, k, v, u))
    y = _apply(state + _outer(v, u * k), r)
    return y.astype(out_dtype), state * d[:, :, None, :] + _outer(v, k)


def _apply(state: State, x: TokenKeys) -> TokenValues:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def _outer(v: TokenValues, k: TokenKeys) -> Array:
    return v[..., None] * k[:, :, None, :]


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State]:
    def one(r: TokenKeys, w: TokenKeys, k: TokenKeys, v: TokenValues, state: State):
        return step(options, platform, r, w, k, v, u, state)

    return _chunked.token_by_token(one, initial_state, (r, w, k, v), marks)
