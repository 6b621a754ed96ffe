"""The embedding of tokens, with a gradient that has the same bits in each run.

The gradient of a look-up adds up rows of the same token. With deterministic kernels, XLA goes over
all numbers of all rows a dozen times for that. Here small matrix products sum the rows of each
token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

SIDE = 64
"""How many rows of sorted tokens a product sums."""


def of_weight(weight: Any, tokens: Array, dtype: DTypeLike) -> Array:
    """`look_up` in the weight of an embedding, for `Kernels.embed`."""
    return look_up(weight.weight, tokens, dtype)


def look_up(
    table: Float[Array, "vocabulary C"], tokens: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape C"]:
    """The rows of the tokens in `dtype`, or zeros for a token that is not in the table."""
    # An index below 0 would count from the end.
    tokens = jnp.where(tokens < 0, len(table), tokens)
    return _look_up(jax.ShapeDtypeStruct(table.shape, table.dtype), jnp.dtype(dtype), table, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _look_up(shape: jax.ShapeDtypeStruct, dtype: jnp.dtype, table: Array, tokens: Array) -> Array:
    """`shape` is that of the table, for the gradient."""
    del shape
    return table.at[tokens].get(mode="fill", fill_value=0).astype(dtype)


def _backward(
    shape: jax.ShapeDtypeStruct, dtype: jnp.dtype, tokens: Array, dx: Array
) -> tuple[Array, None]:
    del dtype
    vocabulary, width = shape.shape
    sums = _sums(vocabulary, tokens.ravel(), dx.reshape(tokens.size, width))
    return sums.astype(shape.dtype), None


_look_up.defvjp(lambda *args: (_look_up(*args), args[-1]), _backward)


def _sums(
    vocabulary: int, tokens: Int[Array, " N"], rows: Float[Array, "N C"]
) -> Float[Array, "vocabulary C"]:
    """For each token the sum of its rows, in float32."""
    order = jnp.argsort(tokens, stable=True)
    sums = jnp.zeros((vocabulary, rows.shape[1]), jnp.float32)
    return _added(sums, tokens[order], rows[order])


def _added(
    sums: Float[Array, "vocabulary C"], tokens: Int[Array, " N"], rows: Float[Array, "N C"]
) -> Float[Array, "vocabulary C"]:
    """`sums` with the rows of sorted tokens, which go into blocks of `SIDE`.

    Each block sums the rows of each of its tokens, and adds those of the tokens that begin in it.
    If its first token began in a block before, the sum of that token is a row that is still to be
    added. These rows are `SIDE` times fewer.
    """
    vocabulary, width = sums.shape
    count = -(-tokens.size // SIDE)
    padding = count * SIDE - tokens.size
    tokens = jnp.pad(tokens, (0, padding), constant_values=vocabulary)
    begins = jnp.diff(tokens, prepend=-1) != 0
    tokens, begins = tokens.reshape(count, SIDE), begins.reshape(count, SIDE)
    rows = jnp.pad(rows, ((0, padding), (0, 0))).reshape(count, SIDE, width)

    heads = begins | (jnp.arange(SIDE)[None] == 0)
    same = heads[:, :, None] & (tokens[:, :, None] == tokens[:, None, :])
    parts = jnp.matmul(
        *(same.astype(rows.dtype), rows),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )

    # Indices that occur once, of which those of no token are out of bounds.
    nowhere = vocabulary + jnp.arange(tokens.size).reshape(tokens.shape)
    at = jnp.where(begins & (tokens < vocabulary), tokens, nowhere)
    sums = sums.at[at].add(parts, mode="drop", unique_indices=True)
    if count <= 1:
        return sums
    return _added(sums, tokens[:, 0], jnp.where(begins[:, :1], 0, parts[:, 0]))
