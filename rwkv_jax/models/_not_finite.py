"""Numbers that are not finite: how they are noticed, and what is said of them."""

import jax.numpy as jnp
from jax import Array

REASON = (
    "the parameters have such numbers, or activations exceed the range of their dtype, which is "
    "small for float16"
)
"""Why logits and losses are NaN or infinite."""


def largest(x: Array, *, keepdims: bool = False) -> Array:
    """The largest number of the last axis, in which NaN counts as infinite."""
    # On CPUs `jnp.max` of a large array passes over NaN.
    return jnp.max(jnp.where(jnp.isnan(x), jnp.inf, x), axis=-1, keepdims=keepdims)
