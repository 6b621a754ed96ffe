"""The RWKV-5 "Eagle" language model (5.2, x052): parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_mix_k`. Weights have the official layout, [outputs, inputs].
The vectors of these trees have one axis; most official ones have leading axes of size 1.

Versions 5.0 and 5.1 have one decay and one bonus for each head, and 5.0 has no gate. They are the
same functions with other parameters; `init` gives those of 5.2.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)           for i = k, v, r, g
    z_t = wkv5(R x_r, time_decay, K x_k, V x_v, time_faaaa)
    y_t = O (ln_x(z_t / 8) * silu(G x_g))

with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
exp(-exp(time_decay)), and `ln_x` a normalisation of each head with eps 1e-5. Version 5.0 has
neither the mix for g nor the gate, and exp(time_first) for time_faaaa. The channel mixing has such
a token shift for k and r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv:2404.05892),
the classes `RWKV_Tmix_x052` and `RWKV_CMix_x052` of RWKV-LM's training code, and for the earlier
versions `RWKV_TimeMix_RWKV5_Preview` in RWKV-v4neo.
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
from rwkv_jax.models._channel_mixing import ChannelMixParams as ChannelMixParams
from rwkv_jax.models._channel_mixing import mix_channels
from rwkv_jax.models._config import check_sizes
from rwkv_jax.models._initialisation import (
    Vector,
    bonus,
    decay,
    depth,
    hidden_width,
    orthogonal,
    split,
    token_shift_mix,
)
from rwkv_jax.models._kernels import Options, run
from rwkv_jax.models._linear import Weight, linear
from rwkv_jax.models._model import Generation
from rwkv_jax.models._normalisation import Norm, head_norm
from rwkv_jax.models._public import *  # noqa: F403
from rwkv_jax.models._token_shift import of_previous, shift_and_mix
from rwkv_jax.models._trees import TimeMixState
from rwkv_jax.wkv5 import wkv5, wkv5_step


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
        check_sizes("rwkv5", dataclasses.asdict(self))


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_mix_k` to `time_mix_g` [C] say how much of the present token each input mixes in; the rest
    is of the previous one. `time_decay` is the decay and `time_faaaa` the bonus of the present
    token, [H, K] both, or [H] before version 5.2. Version 5.0 has no `gate`, and `time_first` [H],
    the log of the bonus, in place of `time_faaaa`.
    """

    time_mix_k: Array
    time_mix_v: Array
    time_mix_r: Array
    time_mix_g: Array | None
    time_decay: Array
    time_faaaa: Array | None
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    gate: Weight | None
    ln_x: Norm
    time_first: Array | None = None


def initial_wkv(params: TimeMixParams, batch: int) -> _typing.State:
    """The state of `wkv5` before the first token: zeros."""
    heads = len(params.time_decay)
    head_size = len(params.ln_x.weight) // heads
    return jnp.zeros((batch, heads, head_size, head_size), jnp.float32)


def init_time_mix(key: Key[Array, ""] | None, config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width = config.num_layers, config.hidden_size
    keys = split(key, 4)
    square = (width, width)

    def mix(exponent: float) -> Vector:
        return 1 - token_shift_mix(width, exponent * (1 - layer / layers))

    def of_squares(scale: float) -> Weight:
        return Weight(orthogonal(next(keys), width, width, scale))

    params = TimeMixParams(
        time_mix_k=mix(1.0),
        time_mix_v=mix(1.0) + 0.3 * depth(layer, layers),
        time_mix_r=mix(0.5),
        time_mix_g=mix(0.5),
        time_decay=decay(width, layer, layers).reshape(-1, config.head_size),
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
    hidden, exponent = hidden_width(width), 1 - layer / layers
    params = ChannelMixParams(
        time_mix_k=1 - token_shift_mix(width, exponent),
        time_mix_r=1 - token_shift_mix(width, exponent),
        key=Weight(orthogonal(key, hidden, width, math.sqrt(width / hidden))),
        receptance=Weight(jnp.zeros((width, width))),
        value=Weight(jnp.zeros((width, hidden))),
    )
    return params


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
        *(x, before, options.segment_ids, options.kernels.layers),
    )
    p = _parameters.like(params, x)
    heads = len(params.time_decay)

    def of_heads(z: Float[Array, "B *T C"]) -> Float[Array, "B *T H K"]:
        return z.reshape(*x.shape[:-1], heads, z.shape[-1] // heads)

    r, k, v = linear(p.receptance, x_r), linear(p.key, x_k), linear(p.value, x_v)
    r, k, v = map(of_heads, (r, k, v))
    decay, bonus = (z.reshape(heads, -1) for z in (p.time_decay, _bonus(p)))
    y, last = run(wkv5, wkv5_step, options, x.ndim == 2, (r, decay, k, v, bonus, wkv), "exp")
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


GENERATION = Generation(
    name="rwkv5",
    config=Config,
    time_mix_params=TimeMixParams,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("time_decay", "time_faaaa", "time_first", "ln_x.weight", "ln_x.bias"), ("model",)),
    ),
)

init = GENERATION.init
initial_state = GENERATION.initial_state
hidden_states = GENERATION.hidden_states
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
