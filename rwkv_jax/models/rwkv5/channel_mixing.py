"""The channel mixing: a squared-ReLU network with a gate on each token and the token before it."""

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _channel_mixing
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import check_segment_ids, of_previous
from rwkv_jax.models.rwkv5.parameters import ChannelMixParams


def channel_mix(
    params: ChannelMixParams,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B *T C"], Float[Array, "B C"]]:
    """The channel mixing of a sequence [B, T, C] or a token [B, C], in the dtype of `x`:

        x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)       for i = k, r
        y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

    with the matrices K, R and V of key, receptance and value.

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
    mixes = (of_previous(params.time_mix_k), of_previous(params.time_mix_r))
    weights = _channel_mixing.Weights(params.key, params.receptance, params.value)
    return _channel_mixing.mix_channels(weights, mixes, norm, x, state, segment_ids, layers)
