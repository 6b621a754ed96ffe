"""The time mixing: the inputs of `wkv7` from each token and the token before it, and its output."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import standardise, unit_length
from rwkv_jax.models._token_shift import check_segment_ids, initial_shift, token_shift
from rwkv_jax.models.rwkv7.parameters import TimeMixParams
from rwkv_jax.models.rwkv7.state import TimeMixState, initial_wkv
from rwkv_jax.wkv7 import wkv7, wkv7_step

GROUP_NORM_EPS = 64e-5

Wkv: TypeAlias = Callable[..., tuple[Array, Array]]
"""A function with the arguments and results of `wkv7`, such as `sharding.shard(wkv7, ...)`."""


def time_mix(
    params: TimeMixParams,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None = None,
    v_first: Float[Array, "B *T C"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    wkv: Wkv = wkv7,
) -> tuple[Float[Array, "B *T C"], TimeMixState, Float[Array, "B *T C"]]:
    """The time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`.

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: the state after the tokens before `x`; zeros if None.
      v_first: the value of the first layer. Every other layer needs it.
      segment_ids: as `apply` takes it.
      implementation: the implementation of `wkv7`.
      wkv: the function that mixes sequences: `wkv7`, or `sharding.shard(wkv7, ...)`.

    Returns:
      The output, with the shape and dtype of `x`, the next state, and the value of the first layer.

    Raises:
      ValueError: `v_first` is missing.
      TypeError, ValueError: `segment_ids` is wrong, or given with a token.
    """
    check_segment_ids("time_mix", segment_ids, x.shape[:-1])
    p = _parameters.like(params, x)
    if state is None:
        state = TimeMixState(initial_shift(x), initial_wkv(p, len(x)))
    before, shift = token_shift(x, state.shift, segment_ids)
    mixes = (p.x_r, p.x_w, p.x_k, p.x_v, p.x_a, p.x_g)
    x_r, x_w, x_k, x_v, x_a, x_g = (x + (before - x) * mix for mix in mixes)

    r = linear(p.receptance, x_r)
    w = p.w0 + jnp.tanh(x_w @ p.w1) @ p.w2
    k = linear(p.key, x_k)
    v = linear(p.value, x_v)
    if p.v0 is None or p.v1 is None or p.v2 is None:
        v_first = v
    elif v_first is None:
        raise ValueError("time_mix: v_first is None; only the first layer has a value of its own")
    else:
        v = v + (v_first - v) * jax.nn.sigmoid(p.v0 + x_v @ p.v1 @ p.v2)
    learning_rate = jax.nn.sigmoid(p.a0 + x_a @ p.a1 @ p.a2)
    gate = jax.nn.sigmoid(x_g @ p.g1) @ p.g2
    removal_key = k * p.k_k
    k = k * (1 + (learning_rate - 1) * p.k_a)

    r, w, k, v, learning_rate, removal_key = (
        z.reshape(*z.shape[:-1], *p.r_k.shape) for z in (r, w, k, v, learning_rate, removal_key)
    )
    removal_key = unit_length(removal_key)
    mix: Wkv = wkv if x.ndim == 3 else wkv7_step
    # A function given as `wkv` need not know of segments where there are none.
    segments = {} if segment_ids is None else {"segment_ids": segment_ids}
    y, last = mix(
        *(r, w, k, v, -removal_key, removal_key * learning_rate, state.wkv),
        decay="sigmoid",
        implementation=implementation,
        **segments,
    )
    y = standardise(y, GROUP_NORM_EPS).reshape(x.shape) * p.ln_x.weight + p.ln_x.bias
    bonus = (r * k * jnp.broadcast_to(p.r_k, r.shape)).sum(-1, keepdims=True) * v
    y = linear(p.output, (y + bonus.reshape(x.shape)) * gate)
    return y, TimeMixState(shift, last), v_first
