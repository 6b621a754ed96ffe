"""The time mixing: the inputs of `wkv5` from each token and the token before it, and its output."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._token_shift import check_segment_ids, of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, Wkv, run
from rwkv_jax.models.rwkv5.parameters import TimeMixParams
from rwkv_jax.models.rwkv5.state import initial_wkv
from rwkv_jax.wkv5 import wkv5, wkv5_step

HEAD_NORM_EPS = 1e-5 * 8**2
"""The eps of `ln_x` without the division by the official `head_size_divisor` that is before it."""


def time_mix(
    params: TimeMixParams,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    layers: str | None = None,
    wkv: Wkv = wkv5,
) -> tuple[Float[Array, "B *T C"], TimeMixState]:
    """The time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`:

        x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)       for i = k, v, r, g
        z_t = wkv5(R x_r, time_decay, K x_k, V x_v, time_faaaa)
        y_t = O (ln_x(z_t / 8) * silu(G x_g))

    with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
    exp(-exp(time_decay)), and `ln_x` a normalisation of each head with eps 1e-5. Version 5.0 has
    neither the mix for g nor the gate, and exp(time_first) for time_faaaa.

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: the state after the tokens before `x`; zeros if None.
      segment_ids: as `apply` takes it.
      implementation: the implementation of `wkv5`.
      layers: the implementation of the functions of `rwkv_jax.layers`.
      wkv: the function that mixes sequences: `wkv5`, or `sharding.shard(wkv5, ...)`.

    Returns:
      The output, with the shape and dtype of `x`, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with a token.
    """
    check_segment_ids("time_mix", segment_ids, x.shape[:-1])
    options = Options(segment_ids, implementation, layers, wkv)
    _, y, after, _ = mix_tokens(params, None, x, state, None, options)
    return y, after


def mix_tokens(
    params: TimeMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None,
    of_first: None,
    options: Options,
) -> tuple[Array, Array, TimeMixState, None]:
    """`time_mix` of `x` normalised by `norm`, before its results `x` itself, for other uses, and
    after them what the first block has for all others: nothing."""
    before, wkv = (None, initial_wkv(params, len(x))) if state is None else state
    mixes = (params.time_mix_k, params.time_mix_v, params.time_mix_r, params.time_mix_g)
    x, (x_k, x_v, x_r, *x_g), shift = shift_and_mix(
        norm,
        tuple(of_previous(mix) for mix in mixes if mix is not None),
        *(x, before, options.segment_ids, options.layers_for(x)),
    )
    p = _parameters.like(params, x)
    heads = len(params.time_decay)

    def of_heads(z: Float[Array, "B *T C"]) -> Float[Array, "B *T H K"]:
        return z.reshape(*x.shape[:-1], heads, z.shape[-1] // heads)

    r, k, v = linear(p.receptance, x_r), linear(p.key, x_k), linear(p.value, x_v)
    r, k, v = map(of_heads, (r, k, v))
    decay, bonus = (z.reshape(heads, -1) for z in (p.time_decay, _bonus(p)))
    y, last = run(wkv5_step, options, x.ndim == 2, (r, decay, k, v, bonus), wkv, "exp")
    y = head_norm(params.ln_x, y, HEAD_NORM_EPS)
    if p.gate is not None:
        y = y * jax.nn.silu(linear(p.gate, *x_g))
    y = linear(p.output, y)
    return x, y, TimeMixState(shift, last), None


def _bonus(params: TimeMixParams) -> Array:
    if params.time_faaaa is not None:
        return params.time_faaaa
    if params.time_first is None:
        raise ValueError("rwkv5: time_faaaa and time_first are None; accepted is one of them")
    return jnp.exp(params.time_first)
