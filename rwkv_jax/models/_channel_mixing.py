"""The channel mixing of RWKV-4 to 6: a squared-ReLU network with a gate on each token and the token
before it."""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jax import Array
from jaxtyping import Float

from rwkv_jax import layers as functions
from rwkv_jax.layers import relu_squared
from rwkv_jax.models import _parameters, _recomputation
from rwkv_jax.models._kernels import Options
from rwkv_jax.models._linear import AnyWeight, Weight, WeightByInput, is_plain, linear
from rwkv_jax.models._normalisation import Norm
from rwkv_jax.models._token_shift import of_previous, shift_and_mix


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing of RWKV-4 or 5. `time_mix_k` and `time_mix_r` [C] say how
    much of the present token is mixed in."""

    time_mix_k: Array
    time_mix_r: Array
    key: Weight
    receptance: Weight
    value: Weight | WeightByInput

    @property
    def mixes(self) -> tuple[Array, Array]:
        """The shares of the previous token for k and r."""
        return of_previous(self.time_mix_k), of_previous(self.time_mix_r)


@runtime_checkable
class Gated(Protocol):
    """The parameters of a channel mixing with a gate."""

    @property
    def mixes(self) -> tuple[Array, Array]: ...
    @property
    def key(self) -> Weight: ...
    @property
    def receptance(self) -> Weight: ...
    @property
    def value(self) -> Weight | WeightByInput: ...


def mix_channels(
    params: Gated,
    norm: Norm | None,
    x: Float[Array, "B *T C"],
    state: Float[Array, "B C"] | None,
    options: Options,
) -> tuple[Array, Array, Array]:
    """The channel mixing, as `Generation` describes it."""
    segment_ids, layers = options.segment_ids, options.kernels.layers
    x, (x_k, x_r), shift = shift_and_mix(norm, params.mixes, x, state, segment_ids, layers)
    p = _parameters.like(params, x)
    gate = jax.nn.sigmoid(linear(p.receptance, x_r))
    return x, gate * feed_forward(p.key, p.value, x_k, layers), shift


def feed_forward(
    key: AnyWeight, value: AnyWeight, x: Float[Array, "B *T C"], layers: str | None
) -> Float[Array, "B *T C"]:
    """The network itself, with any weights. `layers` is that of the model, where "ffi" leaves the
    choice open, because there are kernels for some GPUs and some sizes alone."""
    if x.ndim == 2 or not is_plain(key) or not is_plain(value):
        return linear(value, relu_squared(linear(key, x)))
    chosen = None if layers == "ffi" else layers
    y = functions.feed_forward(x, key.weight, value.weight, implementation=chosen)
    return _recomputation.product(y)
