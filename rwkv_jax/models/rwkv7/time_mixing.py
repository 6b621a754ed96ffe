"""The time mixing: the inputs of `wkv7` from each token and the token before it, and its output."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from rwkv_jax.layers import (
    LowRankMap,
    keyed_wkv7,
    projected_read_out,
    read_out,
    value_residual,
    wkv7_keys,
)
from rwkv_jax.models import _parameters, _recomputation
from rwkv_jax.models._linear import Weight, linear, low_rank_maps
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models._wkv import Options, run
from rwkv_jax.models.rwkv7.parameters import TimeMixParams
from rwkv_jax.models.rwkv7.state import initial_wkv
from rwkv_jax.wkv7 import wkv7, wkv7_step


def mix_tokens(
    params: TimeMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None,
    v_first: Float[Array, "B *T C"] | None,
    options: Options,
) -> tuple[Array, Array, TimeMixState, Array]:
    """The time mixing, as `Generation` describes it."""
    layers = options.layers_for(x)
    before, wkv = (None, initial_wkv(params, x.shape[0])) if state is None else state
    mixes = (params.x_r, params.x_w, params.x_k, params.x_v, params.x_a, params.x_g)
    x, mixed, shift = shift_and_mix(norm, mixes, x, before, options.segment_ids, layers)
    x_r, x_w, x_k, x_v, x_a, x_g = mixed

    p = _parameters.like(params, x)
    maps = [
        LowRankMap(x_w, params.w1, params.w2, p.w0, "tanh"),
        LowRankMap(x_a, params.a1, params.a2),
        LowRankMap(x_g, params.g1, params.g2, activation="sigmoid"),
    ]
    if params.v1 is not None and params.v2 is not None:
        # Seen as the input of V too, XLA would compute both products as one, and copy V to do so.
        maps.append(LowRankMap(lax.optimization_barrier(x_v), params.v1, params.v2))
    of_maps = low_rank_maps(maps, layers)
    of_inputs = (linear(p.receptance, x_r), linear(p.key, x_k), linear(p.value, x_v))
    r, k, v, w, rate, gate, *shares = map(_tokens_of_heads(params), (*of_inputs, *of_maps))

    heads = _parameters_of_heads(params)
    if params.v0 is None or not shares:
        v_first, v_again = v, v
    elif v_first is None:
        raise ValueError("time_mix: v_first is None; only the first layer has a value of its own")
    else:
        (share,), first = shares, _tokens_of_heads(params)(v_first)
        v, v_again, v_first = value_residual(
            *(v, share, first, heads(params.v0)), implementation=layers
        )

    k_k, k_a, a0, r_k = map(heads, (params.k_k, params.k_a, params.a0, params.r_k))
    single = x.ndim == 2
    if not single and options.wkv is wkv7 and options.implementation == layers:
        y, bonus, last = keyed_wkv7(
            *(r, w, k, v, rate, k_k, k_a, a0, r_k, wkv),
            segment_ids=options.segment_ids,
            implementation=layers,
        )
    else:
        k, a, b, bonus, r = wkv7_keys(k, rate, r, k_k, k_a, a0, r_k, implementation=layers)
        operands = (r, w, k, v, a, b)
        if single:
            operands = tuple(z[:, 0] for z in operands)
        y, last = run(wkv7_step, options, single, operands, wkv, "sigmoid")
    of_heads = (
        *(y[:, None] if single else y, bonus, v_again, gate),
        *(heads(params.ln_x.weight), heads(params.ln_x.bias)),
    )
    if not single and isinstance(p.output, Weight) and p.output.scale is None:
        y = projected_read_out(*of_heads, p.output.weight, implementation=layers)
        y = _recomputation.product(y)
    else:
        y = linear(p.output, read_out(*of_heads, implementation=layers).reshape(x.shape))
    return x, y, TimeMixState(shift, last), v_first.reshape(x.shape)


def _tokens_of_heads(params: TimeMixParams) -> Callable[[Array], Array]:
    """Makes [B, T, H, K] of [B, T, C], or of [B, C] with T = 1."""

    def tokens_of_heads(x: Array) -> Array:
        tokens = x.shape[1:-1] or (1,)
        return x.reshape(x.shape[0], *tokens, *params.r_k.shape)

    return tokens_of_heads


def _parameters_of_heads(params: TimeMixParams) -> Callable[[Array], Array]:
    """Makes [H, K] of [C], in float32."""
    return lambda x: x.reshape(params.r_k.shape).astype(jnp.float32)
