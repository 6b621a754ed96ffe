"""Optimizers that are traced once for all blocks of the same shapes."""

from typing import Any

import jax
import optax


def by_block(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimizer. It has to change each array by itself: of its state, all but scalars
    belong to one array each.

    It is applied to one block after another, and to all else. JAX traces and lowers a jitted
    function once for arguments of the same shapes, and a model has hundreds of arrays.
    """

    @jax.jit
    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return optimizer.update(updates, state, params)

    def of_all(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        trees = updates, state, params
        leaves = jax.tree.leaves(trees, is_leaf=_has_blocks)
        count = max((len(x.blocks) for x in leaves if _has_blocks(x)), default=0)
        found = [update(*_without_blocks(trees))]
        found += [update(*_block(trees, i)) for i in range(count)]
        return jax.tree.map(_joined, *found, is_leaf=_has_blocks)

    return optax.GradientTransformation(optimizer.init, of_all)


def _has_blocks(x: Any) -> bool:
    return isinstance(getattr(x, "blocks", None), tuple)


def _without_blocks(tree: Any) -> Any:
    return jax.tree.map(
        lambda x: x._replace(blocks=()) if _has_blocks(x) else x, tree, is_leaf=_has_blocks
    )


def _block(tree: Any, number: int) -> Any:
    """Of a tree, a block of each tree of parameters, and scalars."""

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
