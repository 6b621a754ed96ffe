"""Formulas that the official initialisations of several generations use."""

import math

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Key


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
