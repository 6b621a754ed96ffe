"""The official initialisation. All parameters are float32."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from rwkv_jax.models import _parameters
from rwkv_jax.models._channel_mixing import ChannelMixParams
from rwkv_jax.models._initialisation import (
    bonus,
    decay,
    depth,
    head_norm,
    hidden_width,
    token_shift_mix,
)
from rwkv_jax.models._linear import Weight
from rwkv_jax.models.rwkv5.config import Config
from rwkv_jax.models.rwkv5.parameters import TimeMixParams


def init_time_mix(key: Key[Array, ""], config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width = config.layers, config.width
    keys = iter(jax.random.split(key, 4))
    square = (width, width)

    def mix(exponent: float) -> Array:
        return 1 - token_shift_mix(width, exponent * (1 - layer / layers))

    def orthogonal(scale: float) -> Weight:
        return Weight(jax.nn.initializers.orthogonal(scale)(next(keys), square))

    params = TimeMixParams(
        time_mix_k=mix(1.0),
        time_mix_v=mix(1.0) + 0.3 * depth(layer, layers),
        time_mix_r=mix(0.5),
        time_mix_g=mix(0.5),
        time_decay=decay(width, layer, layers).reshape(-1, config.head_size),
        time_faaaa=bonus(width, layer, layers).reshape(-1, config.head_size),
        receptance=orthogonal(1.0),
        key=orthogonal(0.1),
        value=orthogonal(1.0),
        output=Weight(jnp.zeros(square)),
        gate=orthogonal(0.1),
        ln_x=head_norm(width, layer, layers),
    )
    return _parameters.cast(params, jnp.float32)


def init_channel_mix(key: Key[Array, ""], config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are 3.5 times as wide as the model, rounded down to a multiple of 32."""
    layers, width = config.layers, config.width
    hidden, exponent = hidden_width(width), 1 - layer / layers
    params = ChannelMixParams(
        time_mix_k=1 - token_shift_mix(width, exponent),
        time_mix_r=1 - token_shift_mix(width, exponent),
        key=Weight(jax.nn.initializers.orthogonal()(key, (hidden, width))),
        receptance=Weight(jnp.zeros((width, width))),
        value=Weight(jnp.zeros((width, hidden))),
    )
    return _parameters.cast(params, jnp.float32)
