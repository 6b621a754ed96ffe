"""The parameters of the mixings. The fields have the names of the official checkpoints."""

from typing import NamedTuple

from jax import Array

from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._normalisation import Norm


class TimeMixParams(NamedTuple):
    """The parameters of a time mixing.

    `x_r` to `x_g` say how much of the previous token each input mixes in. `w`, `a`, `v` and `g` are
    low-rank maps for the decay, the in-context learning rate, the share of the first layer's value
    and the output gate. The first layer, whose value the others mix in, has no `v0`, `v1`, `v2`.

    Vectors are [C] and `r_k` is [H, K]. `w1`, `a1`, `v1` and `g1` are [C, rank]; `w2`, `a2`, `v2`
    and `g2` are [rank, C].
    """

    x_r: Array
    x_w: Array
    x_k: Array
    x_v: Array
    x_a: Array
    x_g: Array
    w0: Array
    w1: Array
    w2: Array
    a0: Array
    a1: Array
    a2: Array
    v0: Array | None
    v1: Array | None
    v2: Array | None
    g1: Array
    g2: Array
    k_k: Array
    k_a: Array
    r_k: Array
    receptance: Weight
    key: Weight
    value: Weight
    output: Weight
    ln_x: Norm


class ChannelMixParams(NamedTuple):
    """The parameters of a channel mixing. `x_k` [C] says how much of the previous token is mixed
    in."""

    x_k: Array
    key: Weight
    value: Weight | WeightByInput
