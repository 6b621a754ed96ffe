"""The parameters of the mixings. The fields have the names of the official checkpoints."""

from typing import NamedTuple

from jax import Array

from rwkv_jax.models._linear import Weight


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_mix_k`, `time_mix_v` and `time_mix_r` say how much of the present token each input mixes
    in; the rest is of the previous one. `time_decay` is the decay and `time_first` the bonus of the
    present token. All vectors are [C].
    """

    time_mix_k: Array
    time_mix_v: Array
    time_mix_r: Array
    time_decay: Array
    time_first: Array
    key: Weight
    value: Weight
    receptance: Weight
    output: Weight
