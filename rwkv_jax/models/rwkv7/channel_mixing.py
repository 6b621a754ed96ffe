"""The channel mixing: a squared-ReLU network on each token and the token before it."""

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters, _recomputation
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
    # A mix by itself takes longer to compute again than one of six, for as much memory.
    x_k = _recomputation.no_mix(x_k)
    return x, feed_forward(p.key, p.value, x_k, layers), shift
