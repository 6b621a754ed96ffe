"""The time mixing: the inputs of `wkv6` from each token and the token before it, and its output."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear, low_rank
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._recomputation import product
from rwkv_jax.models._token_shift import check_segment_ids, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, Wkv, run
from rwkv_jax.models.rwkv6.parameters import TimeMixParams
from rwkv_jax.models.rwkv6.state import initial_wkv
from rwkv_jax.wkv6 import wkv6, wkv6_step

HEAD_NORM_EPS = 1e-5 * 8**2
"""The eps of `ln_x`: 1e-5 times the square of the official `head_size_divisor`."""


def time_mix(
    params: TimeMixParams,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    layers: str | None = None,
    wkv: Wkv = wkv6,
) -> tuple[Float[Array, "B *T C"], TimeMixState]:
    """The time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`:

        m_i = tanh((x_t + (x_{t-1} - x_t) * time_maa_x) time_maa_w1)_i time_maa_w2_i
        x_i = x_t + (x_{t-1} - x_t) * (time_maa_i + m_i)          for i = w, k, v, r, g
        w = time_decay + tanh(x_w time_decay_w1) time_decay_w2
        y_t = O (ln_x(wkv6(R x_r, w, K x_k, V x_v, time_faaaa)) * silu(G x_g))

    with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
    exp(-exp(w)), and `ln_x` a normalisation of each head with eps 64e-5.

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: the state after the tokens before `x`; zeros if None.
      segment_ids: as `apply` takes it.
      implementation: the implementation of `wkv6`.
      layers: the implementation of the functions of `rwkv_jax.layers`.
      wkv: the function that mixes sequences: `wkv6`, or `sharding.shard(wkv6, ...)`.

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
    # With the mixes 0 and 1 the token itself and the one before it come out, normalised.
    zeros = jnp.zeros_like(params.time_maa_x)
    x, (here, earlier, mixed), shift = shift_and_mix(
        norm,
        (zeros, zeros + 1, params.time_maa_x),
        *(x, before, options.segment_ids, options.layers_for(x)),
    )
    p = _parameters.like(params, x)
    hidden = jnp.tanh(product(mixed @ p.time_maa_w1))
    hidden = hidden.reshape(*x.shape[:-1], *p.time_maa_w2.shape[:2])
    shares = jnp.einsum("...ir,irc->i...c", hidden, p.time_maa_w2)
    change = earlier - here
    mixes = (p.time_maa_w, p.time_maa_k, p.time_maa_v, p.time_maa_r, p.time_maa_g)
    x_w, x_k, x_v, x_r, x_g = (
        here + change * (mix + share) for mix, share in zip(mixes, shares, strict=True)
    )

    r, k, v = linear(p.receptance, x_r), linear(p.key, x_k), linear(p.value, x_v)
    w = low_rank(p.time_decay_w1, p.time_decay_w2, x_w, jnp.tanh, p.time_decay)
    gate = jax.nn.silu(linear(p.gate, x_g))
    r, w, k, v = (z.reshape(*x.shape[:-1], *params.time_faaaa.shape) for z in (r, w, k, v))
    single = x.ndim == 2
    y, last = run(wkv6_step, options, single, (r, w, k, v, p.time_faaaa), wkv, "exp")
    y = linear(p.output, head_norm(params.ln_x, y, HEAD_NORM_EPS) * gate)
    return x, y, TimeMixState(shift, last), None
