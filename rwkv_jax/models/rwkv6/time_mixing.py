"""The time mixing: the inputs of `wkv6` from each token and the token before it, and its output."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear, low_rank
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._recomputation import product
from rwkv_jax.models._token_shift import shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, run
from rwkv_jax.models.rwkv6.parameters import TimeMixParams
from rwkv_jax.models.rwkv6.state import initial_wkv
from rwkv_jax.wkv6 import wkv6_step

HEAD_NORM_EPS = 1e-5 * 8**2
"""The eps of `ln_x`: 1e-5 times the square of the official `head_size_divisor`."""


def mix_tokens(
    params: TimeMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None,
    of_first: None,
    options: Options,
) -> tuple[Array, Array, TimeMixState, None]:
    """The time mixing, as `Generation` describes it."""
    before, wkv = (None, initial_wkv(params, x.shape[0])) if state is None else state
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
    w = low_rank(
        *(params.time_decay_w1, params.time_decay_w2, x_w, options.layers_for(x)),
        *("tanh", p.time_decay),
    )
    gate = jax.nn.silu(linear(p.gate, x_g))
    r, w, k, v = (z.reshape(*x.shape[:-1], *params.time_faaaa.shape) for z in (r, w, k, v))
    single = x.ndim == 2
    y, last = run(wkv6_step, options, single, (r, w, k, v, p.time_faaaa), wkv, "exp")
    y = linear(p.output, head_norm(params.ln_x, y, HEAD_NORM_EPS) * gate)
    return x, y, TimeMixState(shift, last), None
