"""The channel mixing: a squared-ReLU network on each token and the token before it."""

import jax
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import linear
from rwkv_jax.models._token_shift import check_segment_ids, initial_shift, token_shift
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
    p = _parameters.like(params, x)
    before, shift = token_shift(x, initial_shift(x) if state is None else state, segment_ids)
    k = jax.nn.relu(linear(p.key, x + (before - x) * p.x_k))
    return linear(p.value, k * k), shift
