"""Clipping of gradients."""

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

Tree = TypeVar("Tree")

SMALL = 2**19
"""How many numbers an array may have that is joined with others."""

JOINED = 30
"""How many arrays are joined to one. The compiler needs much longer for long ones."""


def global_norm(gradients: Any, places: Any = None) -> Array:
    """The global norm of gradients at `places`, a tree with a `NamedSharding` for each, or on one
    device if that is None."""
    leaves, where = jax.tree.leaves(gradients), jax.tree.leaves(places)
    if not where or where[0].mesh.size == 1:
        return jnp.sqrt(_sum_of_squares(leaves))
    mesh = where[0].mesh

    def local(*shards: Array) -> Array:
        # By how many devices have the same shard.
        same: dict[int, list[Array]] = {}
        for shard, x in zip(shards, leaves, strict=True):
            same.setdefault(mesh.size * shard.size // x.size, []).append(shard)
        sums = (_sum_of_squares(found) / count for count, found in same.items())
        return lax.psum(sum(sums), mesh.axis_names)

    specs = tuple(place.spec for place in where)
    total = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    return jnp.sqrt(total(*leaves))


def _sum_of_squares(arrays: Sequence[Array]) -> Array:
    """Of all numbers of the arrays.

    On a GPU a small kernel takes microseconds whatever it computes, and a model has hundreds of
    vectors and small matrices. They are joined to a few arrays, each of which is squared and summed
    at once.
    """
    small = [x for x in arrays if x.size <= SMALL]
    joined = [_join(small[i : i + JOINED]) for i in range(0, len(small), JOINED)]
    large = [x for x in arrays if x.size > SMALL]
    return jnp.sum(_join([jnp.sum(x * x, axis=-1) for x in (*joined, *large)]))


def scaled(gradients: Tree, norm: Array, limit: float) -> Tree:
    """Gradients of this global norm, scaled so that it is at most `limit`, if that is not 0."""
    if not limit:
        return gradients
    return jax.tree.map(lambda x: jnp.where(norm < limit, x, x / norm * limit), gradients)


def _join(arrays: Sequence[Array]) -> Array:
    """All numbers of the arrays. The barrier keeps the compiler from using the arrays instead."""
    return lax.optimization_barrier(jnp.concatenate([x.ravel() for x in arrays]))
