"""The channel mixing: a squared-ReLU network on each token and the token before it."""

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._channel_mixing import feed_forward
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import shift_and_mix
from rwkv_jax.models.rwkv7.parameters import ChannelMixParams


def mix_channels(
    params: ChannelMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    segment_ids: Int[Array, " B *T"] | None,
    layers: str | None = None,
) -> tuple[Array, Array, Array]:
    """The channel mixing, as `Generation` describes it."""
    x, (x_k,), shift = shift_and_mix(norm, (params.x_k,), x, state, segment_ids, layers)
    p = _parameters.like(params, x)
    return x, feed_forward(p.key, p.value, x_k, layers), shift
