"""The RWKV-7 "Goose" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.receptance.weight`. Weights have the official layout, [outputs,
inputs]. Official vectors have leading axes of size 1; the vectors of these trees do not.

Every forward function has two modes, which the rank of its input selects: a sequence has a time
axis, a single token (decoding) has none. Both modes take a state and return the next one.
Parameters are cast to the dtype of the activations; normalisations, states and logits are float32.

A row of a batch may hold several documents, which `segment_ids` tells apart as in `wkv7`. Neither a
state nor a token shift crosses from one document to the next. Results at padding have no meaning.

The time mixing of normalised activations x is

    x_i = x_t + (x_{t-1} - x_t) * mix_i                           for i = r, w, k, v, a, g
    r, k, v = R x_r, K x_k, V x_v
    w = w0 + tanh(x_w w1) w2
    alpha = sigmoid(a0 + (x_a a1) a2)
    g = sigmoid(x_g g1) g2
    v = v + (v_first - v) * sigmoid(v0 + (x_v v1) v2)             but in the first layer
    kk = k * k_k, with length 1 in each head
    k = k * (1 + (alpha - 1) * k_a)
    z = wkv7(r, w, k, v, -kk, kk * alpha, decay="sigmoid")
    y_t = O ((ln_x(z) + sum(r * k * r_k) v) * g)

with the parameters x_r to x_g as mix_i, the matrices R, K, V and O of receptance, key, value and
output, the value `v_first` of the first layer, and `ln_x` a normalisation of each head with eps
64e-5. The channel mixing has such a token shift for k alone, and y_t = V max(K x_k, 0)^2 with
matrices K and V of its own.

RWKV-7a adds DeepEmbed to it: with the input e_t of the first block, a table s_emb that has n * n
numbers for each token, and a matrix s_emb_x,

    S_t = s_emb[token_t] + s_emb_x e_t                            as a matrix [n, n]
    y_t = V (max(K x_k, 0)^2 * (s0 + ((x_t s1) S_t) s2))

`load` gives the parameters of such a model. `init` does not: initial values are not published.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456); for the
initialisation, the training code of RWKV-LM; and for DeepEmbed, `rwkv_v7a_demo.py` there.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Key

from rwkv_jax import _typing
from rwkv_jax.layers import (
    LowRankMap,
    keyed_wkv7,
    read_out,
    relu_squared,
    value_residual,
    wkv7_keys,
)
from rwkv_jax.models import _parameters, _placement, _recomputation
from rwkv_jax.models._channel_mixing import feed_forward
from rwkv_jax.models._config import check_sizes
from rwkv_jax.models._initialisation import (
    Vector,
    depth,
    head_norm,
    orthogonal,
    split,
    token_shift_mix,
)
from rwkv_jax.models._kernels import Options, Tokens, run
from rwkv_jax.models._linear import (
    Table,
    Weight,
    WeightByInput,
    embed,
    linear,
    low_rank_maps,
    projected_read_out,
)
from rwkv_jax.models._model import Generation
from rwkv_jax.models._normalisation import Norm, layer_norm
from rwkv_jax.models._public import *  # noqa: F403
from rwkv_jax.models._token_shift import shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.models.rwkv7 import block_step
from rwkv_jax.wkv7 import wkv7, wkv7_step


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      num_layers: number of blocks.
      hidden_size: channels of the activations (C), a multiple of `head_size`.
      head_size: channels of a head (K).
      vocab_size: number of different tokens.

    Raises:
      ValueError: a size is not positive, or `hidden_size` is not a multiple of `head_size`.
    """

    num_layers: int
    hidden_size: int
    head_size: int = 64
    vocab_size: int = 65536

    def __post_init__(self):
        check_sizes("rwkv7", dataclasses.asdict(self))


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `x_r` to `x_g` say how much of the previous token each input mixes in. `w`, `a`, `v` and `g` are
    low-rank maps for the decay, the in-context learning rate, the share of the first layer's value
    and the output gate. The first layer, whose value the others mix in, has no `v0`, `v1`, `v2`.

    Vectors are [C] and `r_k` is [H, K]. `w1`, `a1`, `v1` and `g1` are [C, rank]; `w2`, `a2`, `v2`
    and `g2` are [rank, C].
    """

    x_r: Array
    x_w: Array
    x_k: Array
    x_v: Array
    x_a: Array
    x_g: Array
    w0: Array
    w1: Array
    w2: Array
    a0: Array
    a1: Array
    a2: Array
    v0: Array | None
    v1: Array | None
    v2: Array | None
    g1: Array
    g2: Array
    k_k: Array
    k_a: Array
    r_k: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing. `x_k` [C] says how much of the previous token is mixed
    in.

    The others are those of DeepEmbed, or None: `s0` [F], `s1` [C, n] and `s2` [n, F] for the F
    outputs of `key`, `s_emb` [vocabulary, n * n] and `s_emb_x` [n * n, C].
    """

    x_k: Array
    key: Weight
    value: Weight | WeightByInput
    s0: Array | None = None
    s1: Array | None = None
    s2: Array | None = None
    s_emb: Table | None = None
    s_emb_x: Weight | None = None


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv7` before the first token: zeros."""
    heads, head_size = params.r_k.shape
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)


def init_time_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width, head_size = config.num_layers, config.hidden_size, config.head_size
    keys = split(key, 7)
    channel: Vector = np.arange(width)
    fraction = channel / max(width - 1, 1)
    linear = fraction - 0.5
    half = max(head_size - 1, 1) / 2
    in_head = (channel % head_size) / half - 1
    zigzag = in_head * np.abs(in_head)

    def mix(exponent: float) -> Vector:
        return token_shift_mix(width, exponent * (1 - layer / layers))

    def low_rank(size: float) -> tuple[Array, Any]:
        # The first matrix starts at 0, so that each map starts as its constant vector.
        rank = max(32, round(size * math.sqrt(width) / 32) * 32)
        return jnp.zeros((width, rank)), orthogonal(next(keys), rank, width, 0.1)

    def square(scale: float) -> Weight:
        return Weight(orthogonal(next(keys), width, width, scale))

    w1, w2 = low_rank(2.5)
    a1, a2 = low_rank(2.5)
    v1, v2 = low_rank(1.7)
    g1, g2 = low_rank(5.0)
    first = layer == 0
    params = TimeMixParams(
        x_r=mix(0.2),
        x_w=mix(0.9),
        x_k=mix(0.7),
        x_v=mix(0.7),
        x_a=mix(0.9),
        x_g=mix(0.2),
        w0=-5.5 + 6 * fraction ** (1 + depth(layer, layers) ** 0.3) + 2.5 * zigzag,
        w1=w1,
        w2=w2,
        a0=-0.19 + 0.3 * zigzag + 0.4 * linear,
        a1=a1,
        a2=a2,
        v0=None if first else 0.73 - 0.4 * linear,
        v1=None if first else v1,
        v2=None if first else v2,
        g1=g1,
        g2=g2,
        k_k=0.71 - 0.1 * linear,
        k_a=jnp.full(width, 1.02),
        r_k=jnp.full((width // head_size, head_size), -0.04),
        receptance=square(1.0),
        key=square(0.1),
        value=square(1.0),
        output=Weight(jnp.zeros((width, width))),
        ln_x=head_norm(width, layer, layers),
    )
    return params


def init_channel_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are four times as wide as the model."""
    layers, width = config.num_layers, config.hidden_size
    params = ChannelMixParams(
        x_k=token_shift_mix(width, (1 - layer / layers) ** 4),
        key=Weight(orthogonal(key, 4 * width, width, 0.5)),
        value=Weight(jnp.zeros((width, 4 * width))),
    )
    return params


def mix_tokens(
    params: TimeMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: TimeMixState | None,
    v_first: Float[Array, "B *T inner"] | None,
    options: Options,
) -> tuple[Array, Array, TimeMixState, Array]:
    """The time mixing, as `Generation` describes it."""
    segment_ids, kernels = options.segment_ids, options.kernels
    layers = kernels.layers
    before, wkv = (None, initial_wkv(params, x.shape[0])) if state is None else state
    mixes = (params.x_r, params.x_w, params.x_k, params.x_v, params.x_a, params.x_g)
    x, mixed, shift = shift_and_mix(norm, mixes, x, before, segment_ids, layers)
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
    # One of many devices may have fewer channels here than x.
    inner = (*x.shape[:-1], params.r_k.size)
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
    if not single and kernels.wkv in (None, wkv7) and kernels.operator == layers:
        y, bonus, last = keyed_wkv7(
            *(r, w, k, v, rate, k_k, k_a, a0, r_k, wkv),
            segment_ids=segment_ids,
            implementation=layers,
        )
    else:
        k, a, b, bonus, r = wkv7_keys(k, rate, r, k_k, k_a, a0, r_k, implementation=layers)
        operands = (r, w, k, v, a, b)
        if single:
            operands = tuple(z[:, 0] for z in operands)
        y, last = run(wkv7, wkv7_step, options, single, (*operands, wkv), "sigmoid")
    of_heads = (
        *(y[:, None] if single else y, bonus, v_again, gate),
        *(heads(params.ln_x.weight), heads(params.ln_x.bias)),
    )
    if single:
        y = linear(p.output, read_out(*of_heads, implementation=layers).reshape(inner))
    else:
        y = projected_read_out(p.output, of_heads, layers)
    return x, y, TimeMixState(shift, last), v_first.reshape(inner)


def _tokens_of_heads(params: TimeMixParams) -> Callable[[Array], Array]:
    """Makes [B, T, H, K] of [B, T, C], or of [B, C] with T = 1."""

    def tokens_of_heads(x: Array) -> Array:
        tokens = x.shape[1:-1] or (1,)
        return x.reshape(x.shape[0], *tokens, *params.r_k.shape)

    return tokens_of_heads


def _parameters_of_heads(params: TimeMixParams) -> Callable[[Array], Array]:
    """Makes [H, K] of [C], in float32."""
    return lambda x: x.reshape(params.r_k.shape).astype(jnp.float32)


def mix_channels(
    params: ChannelMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    options: Options,
) -> tuple[Array, Array, Array]:
    """The channel mixing, as `Generation` describes it."""
    segment_ids, layers = options.segment_ids, options.kernels.layers
    x, (x_k,), shift = shift_and_mix(norm, (params.x_k,), x, state, segment_ids, layers)
    if params.s_emb is not None:
        gate = _deep_embed(params, x if norm is None else layer_norm(norm, x), options.tokens)
        hidden = relu_squared(linear(params.key, x_k)) * gate
        return x, linear(params.value, hidden), shift
    p = _parameters.like(params, x)
    # A mix by itself takes longer to compute again than one of six, for as much memory.
    x_k = _recomputation.save_under_mixes(x_k)
    return x, feed_forward(p.key, p.value, x_k, layers), shift


def _deep_embed(
    params: Any, x: Float[Array, "B *T C"], tokens: Tokens | None
) -> Float[Array, "B *T F"]:
    """The factors of the hidden activations for normalised inputs, with all parameters."""
    if tokens is None:
        raise ValueError(
            "channel_mix: params has tables for tokens (DeepEmbed); accepted are params without, "
            "and whole models as apply takes them"
        )
    of_tokens = embed(params.s_emb, tokens.ids, x.dtype) + linear(params.s_emb_x, tokens.embedded)
    low = linear(WeightByInput(params.s1), x)
    matrices = of_tokens.reshape(*low.shape, low.shape[-1])
    low = jnp.einsum("...i,...io->...o", low, matrices)
    return linear(WeightByInput(params.s2), low) + _parameters.like(params.s0, x)


GENERATION = Generation(
    name="rwkv7",
    config=Config,
    time_mix_params=TimeMixParams,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("w1", "a1", "v1", "g1"), ("data",)),
        (("w2", "a2", "v2", "g2", "s2"), ("data", "model")),
        (("s1", "s_emb_x.weight"), ("data",)),
        (("s0",), ("model",)),
        (("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias"), ("model",)),
    ),
    step_block=block_step.step_block,
    deferred_block=block_step.deferred,
)

init = GENERATION.init
initial_state = GENERATION.initial_state
hidden_states = GENERATION.hidden_states
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
