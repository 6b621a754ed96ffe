"""The RWKV-6 "Finch" language model (x060): parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_maa_w1`. Weights have the official layout, [outputs,
inputs]. The vectors of these trees have one axis; most official ones have leading axes of size 1.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    m_i = tanh((x_t + (x_{t-1} - x_t) * time_maa_x) time_maa_w1)_i time_maa_w2_i
    x_i = x_t + (x_{t-1} - x_t) * (time_maa_i + m_i)              for i = w, k, v, r, g
    w = time_decay + tanh(x_w time_decay_w1) time_decay_w2
    y_t = O (ln_x(wkv6(R x_r, w, K x_k, V x_v, time_faaaa)) * silu(G x_g))

with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
exp(-exp(w)), and `ln_x` a normalisation of each head with eps 64e-5. The channel mixing has
x_i = x_t + (x_{t-1} - x_t) * time_maa_i for i = k, r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv:2404.05892),
and the classes `RWKV_Tmix_x060` and `RWKV_CMix_x060` of RWKV-LM's training code.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from rwkv_jax import _typing
from rwkv_jax.models import _initialisation, _parameters, _placement
from rwkv_jax.models._channel_mixing import mix_channels
from rwkv_jax.models._config import check_sizes
from rwkv_jax.models._initialisation import (
    Vector,
    bonus,
    decay,
    depth,
    hidden_width,
    orthogonal,
    small,
    split,
    token_shift_mix,
)
from rwkv_jax.models._kernels import Options, run
from rwkv_jax.models._linear import Weight, WeightByInput, linear, low_rank
from rwkv_jax.models._model import Generation
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._public import *  # noqa: F403
from rwkv_jax.models._recomputation import product
from rwkv_jax.models._token_shift import shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.wkv6 import wkv6, wkv6_step


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      num_layers: number of blocks.
      hidden_size: channels of the activations (C), a multiple of `head_size`.
      head_size: channels of a head (K).
      vocab_size: number of different tokens.
      mix_rank: rank of each map that makes the token shift depend on the token.
      decay_rank: rank of the map that makes the decay depend on the token.

    Raises:
      ValueError: a size is not positive, or `hidden_size` is not a multiple of `head_size`.
    """

    num_layers: int
    hidden_size: int
    head_size: int = 64
    vocab_size: int = 65536
    mix_rank: int = 32
    decay_rank: int = 64

    def __post_init__(self):
        check_sizes("rwkv6", dataclasses.asdict(self))


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_maa_w` to `time_maa_g` say how much of the previous token each input mixes in. A low-rank
    map adds to them what depends on the token: `time_maa_x` mixes its input, `time_maa_w1` is
    [C, 5 ranks] and `time_maa_w2` [5, rank, C], both for w, k, v, r and g in this order.
    `time_decay_w1` [C, rank] and `time_decay_w2` [rank, C] are the same for the decay
    `time_decay`. `time_faaaa` [H, K] is the bonus of the present token. Other vectors are [C].
    """

    time_maa_x: Array
    time_maa_w: Array
    time_maa_k: Array
    time_maa_v: Array
    time_maa_r: Array
    time_maa_g: Array
    time_maa_w1: Array
    time_maa_w2: Array
    time_decay: Array
    time_decay_w1: Array
    time_decay_w2: Array
    time_faaaa: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    gate: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing. `time_maa_k` and `time_maa_r` [C] say how much of the
    previous token is mixed in."""

    time_maa_k: Array
    time_maa_r: Array
    key: Weight
    receptance: Weight
    value: Weight | WeightByInput

    @property
    def mixes(self) -> tuple[Array, Array]:
        """The shares of the previous token for k and r."""
        return self.time_maa_k, self.time_maa_r


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv6` before the first token: zeros."""
    heads, head_size = params.time_faaaa.shape
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)


def init_time_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width = config.num_layers, config.hidden_size
    keys = split(key, 6)
    square = (width, width)

    def mix(exponent: float) -> Vector:
        return token_shift_mix(width, exponent * (1 - layer / layers))

    def of_squares(scale: float) -> Weight:
        return Weight(orthogonal(next(keys), width, width, scale))

    params = TimeMixParams(
        time_maa_x=mix(1.0),
        time_maa_w=mix(1.0),
        time_maa_k=mix(1.0),
        time_maa_v=mix(1.0) - 0.3 * depth(layer, layers),
        time_maa_r=mix(0.5),
        time_maa_g=mix(0.5),
        time_maa_w1=jnp.zeros((width, 5 * config.mix_rank)),
        time_maa_w2=small(next(keys), (5, config.mix_rank, width)),
        time_decay=decay(width, layer, layers),
        time_decay_w1=jnp.zeros((width, config.decay_rank)),
        time_decay_w2=small(next(keys), (config.decay_rank, width)),
        time_faaaa=bonus(width, layer, layers).reshape(-1, config.head_size),
        receptance=of_squares(1.0),
        key=of_squares(0.1),
        value=of_squares(1.0),
        output=Weight(jnp.zeros(square)),
        gate=of_squares(0.1),
        ln_x=_initialisation.head_norm(width, layer, layers),
    )
    return params


def init_channel_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are 3.5 times as wide as the model, rounded down to a multiple of 32."""
    layers, width = config.num_layers, config.hidden_size
    hidden, exponent = hidden_width(width), (1 - layer / layers) ** 3
    params = ChannelMixParams(
        time_maa_k=token_shift_mix(width, exponent),
        time_maa_r=token_shift_mix(width, exponent),
        key=Weight(orthogonal(key, hidden, width, math.sqrt(width / hidden))),
        receptance=Weight(jnp.zeros((width, width))),
        value=Weight(jnp.zeros((width, hidden))),
    )
    return params


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
        *(x, before, options.segment_ids, options.kernels.layers),
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
        *(params.time_decay_w1, params.time_decay_w2, x_w, options.kernels.layers),
        *("tanh", p.time_decay),
    )
    gate = jax.nn.silu(linear(p.gate, x_g))
    r, w, k, v = (z.reshape(*x.shape[:-1], *params.time_faaaa.shape) for z in (r, w, k, v))
    single = x.ndim == 2
    y, last = run(wkv6, wkv6_step, options, single, (r, w, k, v, p.time_faaaa, wkv), "exp")
    y = linear(p.output, head_norm(params.ln_x, y, HEAD_NORM_EPS) * gate)
    return x, y, TimeMixState(shift, last), None


GENERATION = Generation(
    name="rwkv6",
    config=Config,
    time_mix_params=TimeMixParams,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("time_maa_w1", "time_decay_w1"), ("data",)),
        (("time_decay_w2",), ("data", "model")),
        (("time_decay", "time_faaaa", "ln_x.weight", "ln_x.bias"), ("model",)),
    ),
)

init = GENERATION.init
initial_state = GENERATION.initial_state
hidden_states = GENERATION.hidden_states
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
