"""The time mixing: the inputs of `wkv5` from each token and the token before it, and its output."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._token_shift import of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, run
from rwkv_jax.models.rwkv5.parameters import TimeMixParams
from rwkv_jax.models.rwkv5.state import initial_wkv
from rwkv_jax.wkv5 import wkv5_step

HEAD_NORM_EPS = 1e-5 * 8**2
"""The eps of `ln_x` without the division by the official `head_size_divisor` that is before it."""


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
