"""The official initialisation. All parameters are float32."""

import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from rwkv_jax.models import _parameters
from rwkv_jax.models._channel_mixing import ChannelMixParams
from rwkv_jax.models._initialisation import decay, depth, orthogonal, token_shift_mix, zigzag
from rwkv_jax.models._linear import Weight
from rwkv_jax.models.rwkv4.config import Config
from rwkv_jax.models.rwkv4.parameters import TimeMixParams


def init_time_mix(key: Key[Array, ""], config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width = config.layers, config.width

    def mix(exponent: float) -> Array:
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
    return _parameters.cast(params, jnp.float32)


def init_channel_mix(key: Key[Array, ""], config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are four times as wide as the model."""
    layers, width = config.layers, config.width
    hidden, exponent = 4 * width, 1 - layer / layers
    params = ChannelMixParams(
        time_mix_k=1 - token_shift_mix(width, exponent),
        time_mix_r=1 - token_shift_mix(width, exponent),
        key=Weight(orthogonal(key, hidden, width, 1.0)),
        receptance=Weight(jnp.zeros((width, width))),
        value=Weight(jnp.zeros((width, hidden))),
    )
    return _parameters.cast(params, jnp.float32)
