"""The official initialisation. All parameters are float32."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Key

from rwkv_jax.models import _parameters
from rwkv_jax.models._initialisation import depth, head_norm, orthogonal, token_shift_mix
from rwkv_jax.models._linear import Weight
from rwkv_jax.models.rwkv7.config import Config
from rwkv_jax.models.rwkv7.parameters import ChannelMixParams, TimeMixParams


def init_time_mix(key: Key[Array, ""], config: Config, layer: int) -> TimeMixParams:
    """The parameters of the time mixing of layer `layer`, from 0."""
    layers, width, head_size = config.layers, config.width, config.head_size
    keys = iter(jax.random.split(key, 7))
    channel = jnp.arange(width, dtype=jnp.float32)
    fraction = channel / max(width - 1, 1)
    linear = fraction - 0.5
    half = max(head_size - 1, 1) / 2
    in_head = (channel % head_size) / half - 1
    zigzag = in_head * jnp.abs(in_head)

    def mix(exponent: float) -> Array:
        return token_shift_mix(width, exponent * (1 - layer / layers))

    def low_rank(size: float) -> tuple[Array, Array]:
        # The first matrix starts at 0, so that each map starts as its constant vector.
        rank = max(32, round(size * math.sqrt(width) / 32) * 32)
        return jnp.zeros((width, rank)), orthogonal(next(keys), rank, width, 0.1)

    def square(scale: float) -> Weight:
        return Weight(jax.nn.initializers.orthogonal(scale)(next(keys), (width, width)))

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
    return _parameters.cast(params, jnp.float32)


def init_channel_mix(key: Key[Array, ""], config: Config, layer: int) -> ChannelMixParams:
    """The parameters of the channel mixing of layer `layer`, from 0. Its hidden
    activations are four times as wide as the model."""
    layers, width = config.layers, config.width
    params = ChannelMixParams(
        x_k=token_shift_mix(width, (1 - layer / layers) ** 4),
        key=Weight(jax.nn.initializers.orthogonal()(key, (4 * width, width))),
        value=Weight(jnp.zeros((width, 4 * width))),
    )
    return _parameters.cast(params, jnp.float32)
