"""The parameters of the time mixing. The fields have the names of the official checkpoints."""

from typing import NamedTuple

from jax import Array

from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `time_mix_k` to `time_mix_g` [C] say how much of the present token each input mixes in; the rest
    is of the previous one. `time_decay` is the decay and `time_faaaa` the bonus of the present
    token, [H, K] both, or [H] before version 5.2. Version 5.0 has no `gate`, and `time_first` [H],
    the log of the bonus, in place of `time_faaaa`.
    """

    time_mix_k: Array
    time_mix_v: Array
    time_mix_r: Array
    time_mix_g: Array | None
    time_decay: Array
    time_faaaa: Array | None
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    gate: Weight | None
    ln_x: Norm
    time_first: Array | None = None
