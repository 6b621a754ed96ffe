"""Clipping of gradients."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = TypeVar("Tree")

SMALL = 2**19
"""How many numbers a gradient may have that is joined with others."""

JOINED = 30
"""How many gradients are joined to one array. The compiler needs much longer for long ones."""


def global_norm(gradients: Any, *, devices: int = 1) -> Array:
    """The global norm of gradients on so many devices.

    On a GPU a small kernel takes microseconds whatever it computes, and a model has hundreds of
    vectors and small matrices. Their gradients are joined to a few arrays, each of which is squared
    and summed at once; not on several devices, of which each would get the whole of these arrays.
    """
    leaves = jax.tree.leaves(gradients)
    if devices > 1:
        return jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))
    small = [x for x in leaves if x.size <= SMALL]
    joined = [_join(small[i : i + JOINED]) for i in range(0, len(small), JOINED)]
    large = [x for x in leaves if x.size > SMALL]
    return jnp.sqrt(jnp.sum(_join([jnp.sum(x * x, axis=-1) for x in (*joined, *large)])))


def scaled(gradients: Tree, norm: Array, limit: float) -> Tree:
    """Gradients of this global norm, scaled so that it is at most `limit`, if that is not 0."""
    if not limit:
        return gradients
    return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), gradients)


def _join(arrays: Sequence[Array]) -> Array:
    """All numbers of the arrays. The barrier keeps the compiler from using the arrays instead."""
    return lax.optimization_barrier(jnp.concatenate([x.ravel() for x in arrays]))
