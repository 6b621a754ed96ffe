"""The time mixing: the inputs of `wkv4` from each token and the token before it, and its output."""

import jax
from jax import Array
from jaxtyping import Float

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, run
from rwkv_jax.models.rwkv4.parameters import TimeMixParams
from rwkv_jax.models.rwkv4.state import initial_wkv
from rwkv_jax.wkv4 import wkv4_step


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
    mixes = (params.time_mix_k, params.time_mix_v, params.time_mix_r)
    x, (x_k, x_v, x_r), shift = shift_and_mix(
        norm,
        tuple(map(of_previous, mixes)),
        *(x, before, options.segment_ids, options.layers_for(x)),
    )
    decay, first = params.time_decay.astype(x.dtype), params.time_first.astype(x.dtype)
    p = _parameters.like(params, x)
    gate = jax.nn.sigmoid(linear(p.receptance, x_r))
    operands = (decay, first, linear(p.key, x_k), linear(p.value, x_v))
    y, last = run(wkv4_step, options, x.ndim == 2, operands, wkv, "exp")
    y = linear(p.output, gate * y)
    return x, y, TimeMixState(shift, last), None
