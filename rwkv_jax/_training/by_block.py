"""Trees of parameters in parts: all but the blocks, and one part for each block.

JAX traces, lowers and compiles a function once for arguments of the same shapes. One that treats
each array by itself is compiled in a moment if it is given one block after another, and not the
hundreds of arrays of all blocks at once.
"""

from collections.abc import Sequence
from typing import Any

import jax


def parts(tree: Any) -> list[Any]:
    """The parts of a tree. Each has the scalars, and the first one all other arrays that are not in
    blocks. A tree whose blocks have no arrays is one part."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_has_blocks)
    count = max((len(x.blocks) for x in leaves if _has_blocks(x) and _has_arrays(x)), default=0)
    if not count:
        return [tree]
    found = [[x._replace(blocks=()) if _has_blocks(x) else x for x in leaves]]
    kept = [x if _has_blocks(x) or x.ndim == 0 else None for x in leaves]
    found += [[_block(x, i) if _has_blocks(x) else x for x in kept] for i in range(count)]
    return [jax.tree.unflatten(structure, x) for x in found]


def joined(parts: Sequence[Any]) -> Any:
    """The tree of these parts."""
    if len(parts) == 1:
        return parts[0]
    return jax.tree.map(_joined, *parts, is_leaf=_has_blocks)


def _has_blocks(x: Any) -> bool:
    return isinstance(getattr(x, "blocks", None), tuple)


def _has_arrays(x: Any) -> bool:
    return bool(jax.tree.leaves(x.blocks))


def _block(x: Any, number: int) -> Any:
    return x._replace(**dict.fromkeys(x._fields) | {"blocks": (x.blocks[number],)})


def _joined(rest: Any, *blocks: Any) -> Any:
    if not _has_blocks(rest):
        return rest
    return rest._replace(blocks=tuple(x.blocks[0] for x in blocks))
