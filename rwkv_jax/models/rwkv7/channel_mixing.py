"""The channel mixing: a squared-ReLU network on each token and the token before it."""

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.layers import relu_squared
from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import check_segment_ids, shift_and_mix
from rwkv_jax.models.rwkv7.parameters import ChannelMixParams


def channel_mix(
    params: ChannelMixParams,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
    """The channel mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`.

    Args:
      params: the parameters of one layer.
      x: the normalised input.
      state: the input of the token before the first one; zeros if None.
      segment_ids: as `apply` takes it.

    Returns:
      The output, with the shape and dtype of `x`, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with a token.
    """
    check_segment_ids("channel_mix", segment_ids, x.shape[:-1])
    return mix_channels(params, None, x, state, segment_ids)[1:]


def mix_channels(
    params: ChannelMixParams,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    segment_ids: Int[Array, "B T"] | None,
    layers: str | None = None,
) -> tuple[Array, Array, Array]:
    """`channel_mix` of `x` normalised by `norm`, and before its results `x` itself, for other
    uses."""
    x, (x_k,), shift = shift_and_mix(norm, (params.x_k,), x, state, segment_ids, layers)
    p = _parameters.like(params, x)
    return x, linear(p.value, relu_squared(linear(p.key, x_k))), shift
