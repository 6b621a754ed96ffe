"""Linear maps without bias: within layers, as the embedding and as the output head."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models._recomputation import product


class Weight(NamedTuple):
    """The weight of a linear map, [outputs, inputs], or of an embedding, [vocabulary, C]."""

    weight: Array


def linear(params: Weight, x: Float[Array, "*shape inputs"]) -> Float[Array, "*shape outputs"]:
    """The linear map in the dtype of `x` and the weight, which is the same."""
    return product(jnp.einsum("...i,oi->...o", x, params.weight))


def low_rank(
    first: Float[Array, "inputs rank"],
    second: Float[Array, "rank outputs"],
    x: Float[Array, "*shape inputs"],
    activation: Callable[[Array], Array] = lambda x: x,
    offset: Float[Array, "... outputs"] | None = None,
) -> Float[Array, "*shape outputs"]:
    """activation(x first) second + offset, with an offset that has the number of axes of `x`."""
    hidden = activation(product(x @ first))
    if offset is None:
        return hidden @ second
    if x.ndim == 2:
        return hidden @ second + offset
    # For many tokens an offset within the product saves a pass over its results, and one over their
    # gradients. Products are slow with a rank that is no multiple of 8.
    more = 8 - hidden.shape[-1] % 8
    ones = jnp.pad(hidden, ((0, 0),) * (x.ndim - 1) + ((0, more),), constant_values=1)
    rows = jnp.concatenate([second, offset.reshape(1, -1)])
    return ones @ jnp.pad(rows, ((0, more - 1), (0, 0)))


def embed(
    params: Weight, tokens: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape C"]:
    """The embedding of each token in `dtype`."""
    return params.weight[tokens].astype(dtype)


def logits(params: Weight, x: Float[Array, "*shape C"]) -> Float32[Array, "*shape vocabulary"]:
    """The output head: multiplied in the dtype of `x`, with sums and results in float32."""
    weight = params.weight.astype(x.dtype)
    return jnp.einsum("...c,nc->...n", x, weight, preferred_element_type=jnp.float32)
