"""What of a tree is trained."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from rwkv_jax.finetuning import _patterns
from rwkv_jax.models import _parameters

Tree = TypeVar("Tree")

FROZEN = "frozen"
"""The label of what is not trained."""


def labels(tree: Any, groups: Mapping[str, str | Sequence[str]]) -> Any:
    """The group of each leaf of a tree, for `optax.multi_transform`.

    The tree is any of parameters, an adapter and states, such as `{"params": params, "adapter":
    adapter, "states": states}`, whose leaves then have names as `params.blocks.0.att.w0`,
    `adapter.matrices.blocks.0.att.key.lora_A` and `states.blocks.0.att.time_state`.

    Args:
      tree: what has the leaves.
      groups: the patterns of each group, with `*`, `?` and `[...]`: of whole names, as "adapter.*",
        or of what is behind a dot, as "blocks.*.att.w0". A leaf is in the first group that has a
        pattern of its name, and in the group `FROZEN` if there is none.

    Returns:
      A tree of names of groups, with the form of `tree`.

    Raises:
      ValueError: a pattern is that of no leaf, or a leaf of a group is of integers, as those of
        `models.quantize` are.
    """
    patterns = {group: [x] if isinstance(x, str) else list(x) for group, x in groups.items()}
    names = list(_parameters.names(tree))
    for group, own in patterns.items():
        for pattern in own:
            if not any(_patterns.matches(name, [pattern]) for name in names):
                some = ", ".join(names[:3])
                raise ValueError(
                    f"labels: the group {group!r} has {pattern!r}; accepted are patterns of the "
                    f"names in the tree, such as {some}"
                )

    def label(path: KeyPath, x: Any) -> str:
        name = _parameters.name(path)
        group = next((g for g, own in patterns.items() if _patterns.matches(name, own)), FROZEN)
        if group != FROZEN and not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(
                f"labels: the group {group!r} has {name}, which is {x.dtype}; accepted are floats"
            )
        return group

    return jax.tree_util.tree_map_with_path(label, tree)


def split(tree: Tree, labels: Any) -> tuple[Tree, Tree]:
    """The leaves of a tree that are trained, and those that are frozen: two trees with None in the
    place of the others. `join` puts them together.

    Differentiated with respect to the first alone, a function has neither gradients nor moments of
    an optimizer for what is frozen.

    Args:
      tree: the tree.
      labels: as the function `labels` gives them for this tree.
    """

    def part(trained: bool) -> Any:
        return jax.tree.map(lambda x, of: x if (of != FROZEN) == trained else None, tree, labels)

    return part(True), part(False)


def join(trained: Tree, frozen: Tree) -> Tree:
    """The tree of which `split` made these two."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, trained, frozen, is_leaf=lambda x: x is None
    )
