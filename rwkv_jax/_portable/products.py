"""Products of matrices in the precision of a call."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Options

_LEAST_INPUTS = 16
"""Matrix units multiply so many inputs at once."""


class Products(NamedTuple):
    """Products of matrices as `jnp.einsum` names them, of operands and with results in `dtype`.

    Sums are in float32. A result in bfloat16 has been rounded once, after its sum. `fewest` says
    that multiplications are to be saved, and not kernels that wait for each other.
    """

    dtype: Any
    precision: lax.Precision
    fewest: bool

    @property
    def rounds(self) -> bool:
        """Whether operands are rounded."""
        return self.dtype != jnp.float32

    def __call__(self, subscripts: str, x: Array, y: Array, dtype: Any = None) -> Array:
        return jnp.einsum(
            subscripts,
            x.astype(self.dtype),
            y.astype(self.dtype),
            precision=self.precision,
            preferred_element_type=dtype or self.dtype,
        )


def exact(options: Options) -> Products:
    """Products in float32, on a CPU."""
    return Products(jnp.float32, options.precision, fewest=True)


def on_matrix_units(options: Options, dtype: Any, inputs: int) -> Products:
    """Products with a state of so many inputs, where a platform has matrix units: in bfloat16 if
    the dtype has 16 bits and the call does not ask for more. The range of bfloat16, unlike that of
    float16, holds the factors of decays.

    Fewer inputs than matrix units multiply at once are not rounded: that would save nothing, and
    sums of few products may nearly cancel.
    """
    if dtype == jnp.float32 or options.precision != lax.Precision.DEFAULT:
        return exact(options)._replace(fewest=False)
    if inputs < _LEAST_INPUTS:
        return Products(jnp.float32, lax.Precision.HIGHEST, fewest=False)
    return Products(jnp.bfloat16, lax.Precision.DEFAULT, fewest=False)
