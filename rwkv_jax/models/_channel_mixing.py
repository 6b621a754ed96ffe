"""The channel mixing of RWKV-4 to 6, which has a gate."""

from typing import NamedTuple

import jax
from jax import Array
from jaxtyping import Float, Int

from rwkv_jax.layers import relu_squared
from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import Weight, linear
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import shift_and_mix


class Weights(NamedTuple):
    """The linear maps of a channel mixing with a gate."""

    key: Weight
    receptance: Weight
    value: Weight


def mix_channels(
    weights: Weights,
    mixes: tuple[Float[Array, " C"], Float[Array, " C"]],
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    segment_ids: Int[Array, "B T"] | None,
    layers: str | None,
) -> tuple[Array, Array, Array]:
    """sigmoid(R x_r) * (V max(K x_k, 0)^2), with the mixes of x_k and x_r in this order, of `x`
    normalised by `norm`; before it `x` itself, for other uses, and after it the next state."""
    x, (x_k, x_r), shift = shift_and_mix(norm, mixes, x, state, segment_ids, layers)
    p = _parameters.cast(weights, x.dtype)
    gate = jax.nn.sigmoid(linear(p.receptance, x_r))
    return x, gate * linear(p.value, relu_squared(linear(p.key, x_k))), shift
