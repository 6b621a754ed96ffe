"""Products of matrices in the precision of a call."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Options

_LEAST_INPUTS = 16
"""Matrix units multiply so many inputs at once."""


class Products(NamedTuple):
    """Products of matrices as `jnp.einsum` names them, of operands and with results in `dtype`.

    Sums are in float32. A result in bfloat16 has been rounded once, after its sum. With
    `minimize_flops` multiplications are saved, and not kernels that wait for each other.
    """

    dtype: Any
    precision: lax.Precision
    minimize_flops: bool

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

    def apart(self, subscripts: str, x: Array, y: Array) -> Array:
        """A product that XLA must not merge with others of x or y. It would put their other
        operands one behind the other, and take the results apart, which takes a GPU longer than to
        read x and y again."""
        if not self.minimize_flops:
            x, y = lax.optimization_barrier((x, y))
        return self(subscripts, x, y)


def exact(options: Options) -> Products:
    """Products in float32, on a CPU."""
    return Products(jnp.float32, options.precision, minimize_flops=True)


def on_matrix_units(options: Options, dtype: Any, inputs: int) -> Products:
    """Products with a state of so many inputs, where a platform has matrix units: in bfloat16 if
    the dtype has 16 bits and the call does not ask for more. The range of bfloat16, unlike that of
    float16, holds the factors of decays.

    Fewer inputs than matrix units multiply at once are not rounded: that would save nothing, and
    sums of few products may nearly cancel.
    """
    if dtype == jnp.float32 or options.precision != lax.Precision.DEFAULT:
        return exact(options)._replace(minimize_flops=False)
    if inputs < _LEAST_INPUTS:
        return Products(jnp.float32, lax.Precision.HIGHEST, minimize_flops=False)
    return Products(jnp.bfloat16, lax.Precision.DEFAULT, minimize_flops=False)


def sums(product: Products, chosen: Array, x: Array, *, rounded: bool = False) -> Array:
    """The sums in float32 of the tokens x [..., T, K] that each row of `chosen` chooses. With
    `rounded`, x is rounded if other operands are; without it, it has the digits that a platform
    gives a product of float32."""
    matrix = jnp.broadcast_to(chosen.astype(jnp.float32), (*x.shape[:-2], *chosen.shape))
    if rounded and product.rounds:
        return product("...ij,...jk->...ik", matrix, x, jnp.float32)
    precision = product.precision if product.rounds else lax.Precision.HIGHEST
    return jnp.einsum("...ij,...jk->...ik", matrix, x, precision=precision)


def multiplied(product: Products, x: Array, factor: Array) -> Array:
    """An array times its factors, as an operand of products."""
    return (x * factor.astype(jnp.float32)).astype(product.dtype)


def stacked(several: Sequence[Array], axis: int) -> Array:
    """As `jnp.stack` does it, but by choosing. XLA vectorises that on a CPU, and on a GPU it does
    not compute what is stacked anew for each entry."""
    result, *others = (jnp.expand_dims(x, axis) for x in several)
    shape = list(result.shape)
    shape[axis] = len(several)
    number = lax.broadcasted_iota(jnp.int32, shape, axis % len(shape))
    result = jnp.broadcast_to(result, shape)
    for i, x in enumerate(others, 1):
        result = jnp.where(number == i, x, result)
    return result


def entries(side: int) -> tuple[Array, Array]:
    """The row and the column of each entry of a matrix."""
    i, j = (lax.broadcasted_iota(jnp.int32, (side, side), axis) for axis in (0, 1))
    return i, j
