"""The parameters of the mixings. The fields have the names of the official checkpoints."""

from typing import NamedTuple

from jax import Array

from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._normalisation import Norm


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_maa_w` to `time_maa_g` say how much of the previous token each input mixes in. A low-rank
    map adds to them what depends on the token: `time_maa_x` mixes its input, `time_maa_w1` is
    [C, 5 ranks] and `time_maa_w2` [5, rank, C], both for w, k, v, r and g in this order.
    `time_decay_w1` [C, rank] and `time_decay_w2` [rank, C] are the same for the decay
    `time_decay`. `time_faaaa` [H, K] is the bonus of the present token. Other vectors are [C].
    """

    time_maa_x: Array
    time_maa_w: Array
    time_maa_k: Array
    time_maa_v: Array
    time_maa_r: Array
    time_maa_g: Array
    time_maa_w1: Array
    time_maa_w2: Array
    time_decay: Array
    time_decay_w1: Array
    time_decay_w2: Array
    time_faaaa: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    gate: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing. `time_maa_k` and `time_maa_r` [C] say how much of the
    previous token is mixed in."""

    time_maa_k: Array
    time_maa_r: Array
    key: Weight
    receptance: Weight
    value: Weight | WeightByInput

    @property
    def mixes(self) -> tuple[Array, Array]:
        """The shares of the previous token for k and r."""
        return self.time_maa_k, self.time_maa_r
