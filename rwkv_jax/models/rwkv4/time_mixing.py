"""The time mixing: the inputs of `wkv4` from each token and the token before it, and its output."""

import jax
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import check_segment_ids, of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, Wkv, run
from rwkv_jax.models.rwkv4.parameters import TimeMixParams
from rwkv_jax.models.rwkv4.state import initial_wkv
from rwkv_jax.wkv4 import wkv4, wkv4_step


def time_mix(
    params: TimeMixParams,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: str | None = None,
    layers: str | None = None,
    wkv: Wkv = wkv4,
) -> tuple[Float[Array, "B *T C"], TimeMixState]:
    """The time mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`:

        x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)       for i = k, v, r
        y_t = O (sigmoid(R x_r) * wkv4(time_decay, time_first, K x_k, V x_v))

    with the matrices R, K, V and O of receptance, key, value and output, and log decays
    -exp(time_decay).

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: the state after the tokens before `x`; zeros if None.
      segment_ids: as `apply` takes it.
      implementation: the implementation of `wkv4`.
      layers: the implementation of the functions of `rwkv_jax.layers`.
      wkv: the function that mixes sequences: `wkv4`, or `sharding.shard(wkv4, ...)`.

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
