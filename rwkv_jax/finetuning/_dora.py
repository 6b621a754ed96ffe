"""The rows of matrices as magnitudes and directions, for DoRA."""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._row_product import by_compiler


@jax.jit
def norms(weight: Weight | WeightByInput) -> Float32[Array, "*blocks outputs"]:
    """The norm of each row of a matrix."""
    return jnp.sqrt(_squares(weight))


def _squares(weight: Weight | WeightByInput) -> Float32[Array, "*blocks outputs"]:
    return jnp.sum(jnp.square(weight.wide().astype(jnp.float32)), -1)


@jax.jit
def gain(
    base: Weight | WeightByInput,
    first: Float[Array, "*blocks rank inputs"],
    second: Float[Array, "*blocks outputs rank"],
    magnitude: Float[Array, "*blocks outputs"],
) -> Float32[Array, "*blocks outputs"]:
    """magnitude / norm, where the norm of each row of W + B A is a constant for gradients.

    W + B A is not made: its squared norms are those of W and, summed over the rank, the numbers of
    B times those of 2 W A^T + B A A^T.
    """
    if first.ndim == 3:  # of stacked blocks
        return lax.map(lambda block: gain(*block), (base, first, second, magnitude))
    # The compiler would otherwise make W wide here, and keep it for the linear map.
    base, first, second = lax.optimization_barrier(lax.stop_gradient((base, first, second)))
    by_output = isinstance(base, Weight)
    matrix = base.weight if by_output else base.by_input
    across = by_compiler(first, matrix, base.scale, jnp.float32, by_output=by_output)
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    along = jnp.matmul(first, first.T, precision="highest")
    of_change = 2 * across.T + jnp.matmul(second, along, precision="highest")
    squares = _squares(base) + jnp.sum(second * of_change, -1)
    # Rows of zeros stay zero.
    norm = jnp.sqrt(jnp.maximum(squares, jnp.finfo(jnp.float32).tiny))
    return magnitude.astype(jnp.float32) / norm
