"""Blocks of one structure as a single tree of arrays with a leading axis, over which `lax.scan`
goes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import GetAttrKey, KeyPath
from jaxtyping import Bool


class Stacked(NamedTuple):
    """Blocks in stacked form: the first one, which has another structure, and the others as one
    tree whose arrays have a leading axis of blocks. `rest` is None where there are no others. They
    are blocks of parameters, of a state, or of whatever has their structure."""

    first: Any
    rest: Any


def stack(blocks: tuple[Any, ...]) -> Stacked:
    """The blocks in stacked form."""
    if isinstance(blocks, Stacked):
        return blocks
    first, *others = blocks
    rest = jax.tree.map(lambda *xs: jnp.stack(xs), *others) if others else None
    return Stacked(first, rest)


def unstack(blocks: tuple[Any, ...]) -> tuple[Any, ...]:
    """The blocks one by one."""
    if not isinstance(blocks, Stacked):
        return blocks
    if blocks.rest is None:
        return (blocks.first,)
    leaves, tree = jax.tree.flatten(blocks.rest)
    others = zip(*map(tuple, leaves), strict=True)
    return (blocks.first, *(jax.tree.unflatten(tree, block) for block in others))


def is_stacked(path: KeyPath) -> bool:
    """Whether the array at `path` has a leading axis of blocks."""
    return GetAttrKey("rest") in path


def block_axes(path: KeyPath) -> int:
    """How many axes of blocks the array at `path` has before its own, 0 or 1. In a state its own
    begin with that of rows."""
    return 1 if is_stacked(path) else 0


def select_rows(rows: Bool[Array, " B"], x: Any, y: Any) -> Any:
    """The arrays of one state in some rows, and of another one in all others."""

    def selected(path: KeyPath, x: Array, y: Array) -> Array:
        shape = [1] * x.ndim
        shape[block_axes(path)] = len(rows)
        return jnp.where(rows.reshape(shape), x, y)

    return jax.tree_util.tree_map_with_path(selected, x, y)
