"""Trees of parameters in parts: all but the blocks, and one part for each block.

JAX traces, lowers and compiles a function once for arguments of the same shapes. One that treats
each array by itself is compiled in a moment if it is given one block after another, and not the
hundreds of arrays of all blocks at once.
"""

from collections.abc import Sequence
from typing import Any

import jax


def parts(tree: Any) -> list[Any]:
    """The parts of a tree, of which each one has the scalars. What is not in blocks is else in the
    first part alone."""
    leaves = jax.tree.leaves(tree, is_leaf=_has_blocks)
    count = max((len(x.blocks) for x in leaves if _has_blocks(x)), default=0)
    return [_without_blocks(tree), *(_block(tree, i) for i in range(count))]


def joined(parts: Sequence[Any]) -> Any:
    """The tree of these parts."""
    return jax.tree.map(_joined, *parts, is_leaf=_has_blocks)


def _has_blocks(x: Any) -> bool:
    return isinstance(getattr(x, "blocks", None), tuple)


def _without_blocks(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x._replace(blocks=()) if _has_blocks(x) else x, tree, is_leaf=_has_blocks
    )


def _block(tree: Any, number: int) -> Any:
    def cut(x: Any) -> Any:
        if _has_blocks(x):
            alone = dict.fromkeys(x._fields)
            return x._replace(**alone | {"blocks": (x.blocks[number],)})
        return x if x.ndim == 0 else None

    return jax.tree.map(cut, tree, is_leaf=_has_blocks)


def _joined(rest: Any, *blocks: Any) -> Any:
    if not _has_blocks(rest):
        return rest
    return rest._replace(blocks=tuple(x.blocks[0] for x in blocks))
