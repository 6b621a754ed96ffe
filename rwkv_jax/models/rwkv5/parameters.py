"""The parameters of the mixings. The fields have the names of the official checkpoints."""

from typing import NamedTuple

from jax import Array

from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_mix_k` to `time_mix_g` [C] say how much of the present token each input mixes in; the rest
    is of the previous one. `time_decay` [H, K] is the decay and `time_faaaa` [H, K] the bonus of
    the present token.
    """

    time_mix_k: Array
    time_mix_v: Array
    time_mix_r: Array
    time_mix_g: Array
    time_decay: Array
    time_faaaa: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    gate: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing. `time_mix_k` and `time_mix_r` [C] say how much of the
    present token is mixed in."""

    time_mix_k: Array
    time_mix_r: Array
    key: Weight
    receptance: Weight
    value: Weight
