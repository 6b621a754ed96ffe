"""Formulas that the official initialisations of several generations use."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm, init_norm
from rwkv_jax.models._trees import BlockParams, Params


def init(
    key: Key[Array, ""],
    config: Any,
    init_time_mix: Callable[[Array, Any, int], Any],
    init_channel_mix: Callable[[Array, Any, int], Any],
) -> Params:
    """Parameters of a model, float32. The functions give the parameters of the mixings of a layer
    from a key, `config` and the number of the layer, from 0."""
    width, vocabulary = config.hidden_size, config.vocab_size
    embedding, head, *blocks = jax.random.split(key, 2 + config.num_layers)

    def block(key: Key[Array, ""], layer: int) -> BlockParams:
        att, ffn = jax.random.split(key)
        return BlockParams(
            ln0=init_norm(width) if layer == 0 else None,
            ln1=init_norm(width),
            ln2=init_norm(width),
            att=init_time_mix(att, config, layer),
            ffn=init_channel_mix(ffn, config, layer),
        )

    params = Params(
        emb=Weight(jax.random.uniform(embedding, (vocabulary, width), minval=-1e-4, maxval=1e-4)),
        blocks=tuple(block(key, layer) for layer, key in enumerate(blocks)),
        ln_out=init_norm(width),
        head=Weight(orthogonal(head, vocabulary, width, 0.5)),
    )
    return _parameters.cast(params, jnp.float32)


def orthogonal(
    key: Key[Array, ""], rows: int, columns: int, scale: float
) -> Float[Array, "rows columns"]:
    """A matrix with orthogonal rows or columns, `scale` times as large as an orthonormal one, and
    larger by sqrt(rows / columns) where it has more rows than columns."""
    scale *= math.sqrt(max(rows / columns, 1))
    return jax.nn.initializers.orthogonal(scale)(key, (rows, columns))


def token_shift_mix(width: int, exponent: float) -> Float[Array, " width"]:
    """The share of the previous token in each channel: from 1 in the first channel to almost 0 in
    the last, and the smaller the exponent, the faster it falls."""
    return 1 - (jnp.arange(width, dtype=jnp.float32) / width) ** exponent


def depth(layer: int, layers: int) -> float:
    """Where a layer (from 0) is in a model: 0 for the first one, 1 for the last."""
    return layer / max(layers - 1, 1)


def hidden_width(width: int) -> int:
    """The hidden channels of the channel mixings of RWKV-5 and 6: 3.5 times those of the model,
    rounded down to a multiple of 32, and at least 32."""
    return max(7 * width // 64 * 32, 32)


def small(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """The second factor of a low-rank map in RWKV-6, whose first factor starts as zeros."""
    return jax.random.uniform(key, shape, minval=-0.01, maxval=0.01)


def _fraction(width: int) -> Float[Array, " width"]:
    return jnp.arange(width, dtype=jnp.float32) / max(width - 1, 1)


def decay(
    width: int, layer: int, layers: int, start: float = -6.0, span: float = 5.0
) -> Float[Array, " width"]:
    """The decay of RWKV-4 to 6, w in exp(-exp(w)): from `start` in the first channel to `start` +
    `span` in the last."""
    return start + span * _fraction(width) ** (0.7 + 1.3 * depth(layer, layers))


def zigzag(width: int) -> Float[Array, " width"]:
    """0, 1, -1, and again."""
    return (jnp.arange(width, dtype=jnp.float32) + 1) % 3 - 1


def bonus(width: int, layer: int, layers: int) -> Float[Array, " width"]:
    """The bonus of the present token in RWKV-5 and 6."""
    return depth(layer, layers) * (1 - _fraction(width)) + 0.1 * zigzag(width)


def head_norm(width: int, layer: int, layers: int) -> Norm:
    """The normalisation of the heads, whose scale grows with the layer (from 0)."""
    return Norm(jnp.full(width, ((1 + layer) / layers) ** 0.7), jnp.zeros(width))
