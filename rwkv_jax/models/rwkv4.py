"""The RWKV-4 "Dove" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_mix_k`. Weights have the official layout, [outputs, inputs].
The vectors of these trees have one axis; some official ones have leading axes of size 1.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)           for i = k, v, r
    y_t = O (sigmoid(R x_r) * wkv4(time_decay, time_first, K x_k, V x_v))

with the matrices R, K, V and O of receptance, key, value and output, and log decays
-exp(time_decay). The channel mixing has such a token shift for k and r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "RWKV: Reinventing RNNs for the Transformer Era" (arXiv:2305.13048), and the classes
`RWKV_TimeMix` and `RWKV_ChannelMix` of RWKV-LM's training code in RWKV-v4neo.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from rwkv_jax.models import _parameters, _placement
from rwkv_jax.models._channel_mixing import ChannelMixParams as ChannelMixParams
from rwkv_jax.models._channel_mixing import mix_channels
from rwkv_jax.models._config import check_sizes
from rwkv_jax.models._initialisation import (
    Vector,
    decay,
    depth,
    orthogonal,
    token_shift_mix,
    zigzag,
)
from rwkv_jax.models._kernels import Options, run
from rwkv_jax.models._linear import Weight, linear
from rwkv_jax.models._model import Generation
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._public import *  # noqa: F403
from rwkv_jax.models._token_shift import of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.wkv4 import Wkv4State, wkv4, wkv4_step
from rwkv_jax.wkv4.signature import NOTHING


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      num_layers: number of blocks.
      hidden_size: channels of the activations (C).
      vocab_size: number of different tokens.

    Raises:
      ValueError: a size is not positive.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int = 50277

    def __post_init__(self):
        check_sizes("rwkv4", dataclasses.asdict(self))


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_mix_k`, `time_mix_v` and `time_mix_r` say how much of the present token each input mixes
    in; the rest is of the previous one. `time_decay` is the decay and `time_first` the bonus of the
    present token. All vectors are [C].
    """

    time_mix_k: Array
    time_mix_v: Array
    time_mix_r: Array
    time_decay: Array
    time_first: Array
    key: Weight
    value: Weight
    receptance: Weight
    output: Weight


def initial_wkv(params: TimeMixParams, batch: int) -> Wkv4State:
    """The state of `wkv4` before the first token: no sums, and no largest weight."""
    shape = (batch, params.time_decay.size)
    return Wkv4State(
        num=jnp.zeros(shape, jnp.float32),
        den=jnp.zeros(shape, jnp.float32),
        log_max=jnp.full(shape, NOTHING, jnp.float32),
    )


def init_time_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width = config.num_layers, config.hidden_size

    def mix(exponent: float) -> Vector:
        return 1 - token_shift_mix(width, exponent * (1 - layer / layers))

    def zeros() -> Weight:
        return Weight(jnp.zeros((width, width)))

    params = TimeMixParams(
        time_mix_k=mix(1.0),
        time_mix_v=mix(1.0) + 0.3 * depth(layer, layers),
        time_mix_r=mix(0.5),
        time_decay=decay(width, layer, layers, start=-5.0, span=8.0),
        time_first=math.log(0.3) + 0.5 * zigzag(width),
        key=zeros(),
        value=Weight(orthogonal(key, width, width, 1.0)),
        receptance=zeros(),
        output=zeros(),
    )
    return params


def init_channel_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are four times as wide as the model."""
    layers, width = config.num_layers, config.hidden_size
    hidden, exponent = 4 * width, 1 - layer / layers
    params = ChannelMixParams(
        time_mix_k=1 - token_shift_mix(width, exponent),
        time_mix_r=1 - token_shift_mix(width, exponent),
        key=Weight(orthogonal(key, hidden, width, 1.0)),
        receptance=Weight(jnp.zeros((width, width))),
        value=Weight(jnp.zeros((width, hidden))),
    )
    return params


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
        *(x, before, options.segment_ids, options.kernels.layers),
    )
    decay, first = params.time_decay.astype(x.dtype), params.time_first.astype(x.dtype)
    p = _parameters.like(params, x)
    gate = jax.nn.sigmoid(linear(p.receptance, x_r))
    operands = (decay, first, linear(p.key, x_k), linear(p.value, x_v), wkv)
    y, last = run(wkv4, wkv4_step, options, x.ndim == 2, operands, "exp")
    y = linear(p.output, gate * y)
    return x, y, TimeMixState(shift, last), None


GENERATION = Generation(
    name="rwkv4",
    config=Config,
    time_mix_params=TimeMixParams,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("time_decay", "time_first"), ("model",)),
    ),
)

init = GENERATION.init
initial_state = GENERATION.initial_state
hidden_states = GENERATION.hidden_states
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
