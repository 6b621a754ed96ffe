"""Clipping of gradients."""

import itertools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

Tree = TypeVar("Tree")

SMALL = 2**19
"""How many numbers a gradient may have that is joined with others."""

JOINED = 100
"""How many gradients are joined to one array. XLA concatenates more than 128 in two steps."""


def clipped(gradients: Tree, limit: float) -> tuple[Tree, Array]:
    """The gradients of one device, scaled so that their global norm is at most `limit`, if that is
    not 0, and the norm before.

    On a GPU a small kernel takes microseconds whatever it computes, and a model has hundreds of
    vectors and small matrices. Their gradients are joined to a few arrays. Each of these is squared
    and summed at once, and what else is computed of one gradient after the other becomes one kernel
    for many, because the compiler fuses computations that read the same array.
    """
    leaves, structure = jax.tree.flatten(gradients)
    small = [i for i, x in enumerate(leaves) if x.size <= SMALL]
    groups = [small[i : i + JOINED] for i in range(0, len(small), JOINED)]
    joined = [_join([leaves[i] for i in group]) for group in groups]
    large = [x for x in leaves if x.size > SMALL]
    norm = jnp.sqrt(jnp.sum(_join([jnp.sum(x * x, axis=-1) for x in (*joined, *large)])))
    for group, whole in zip(groups, joined, strict=True):
        ends = list(itertools.accumulate(leaves[i].size for i in group))
        for i, part in zip(group, jnp.split(whole, ends[:-1]), strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return scaled(jax.tree.unflatten(structure, leaves), norm, limit), norm


def scaled(gradients: Tree, norm: Array, limit: float) -> Tree:
    """Gradients of this global norm, scaled so that it is at most `limit`, if that is not 0."""
    if not limit:
        return gradients
    return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), gradients)


def _join(arrays: Sequence[Array]) -> Array:
    """All numbers of the arrays. The barrier keeps the compiler from using the arrays instead."""
    return lax.optimization_barrier(jnp.concatenate([x.ravel() for x in arrays]))
