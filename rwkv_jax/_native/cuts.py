"""Heads that are cut along V for the CUDA kernels of WKV7 on matrix units, which then have a head
for each part of V. All parts of a head share its keys (`rwkv_jax._operator.heads`).

The rows of a state [V, K] do not depend on each other, so that cutting is a matter of shapes alone:
[..., H, V, ...] is [..., H n, V / n, ...] in the same memory.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")

SIZES = (64, 128)
"""The head sizes for which there are kernels. They fill up smaller heads with zeros."""

LEAST, MULTIPLE = 16, 8
"""The least V of a head, and what it is a multiple of."""


def count(keys: int, values: int) -> int:
    """How many heads of the kernels a head of K and V is: the fewest of the size that K needs. As
    long as V is not too large for all kernels, more than two would take longer than one of 128."""
    size = SIZES[keys > SIZES[0]]
    most = values // LEAST if values > SIZES[1] else 2
    suits = (n for n in range(1, most + 1) if values % (MULTIPLE * n) == 0 and values <= n * size)
    return next(suits, 1)


def cut(axes: Any, arrays: Tree, n: int) -> Tree:
    """A tree of arrays, with each head cut into `n`. `axes` is the tree of their axes."""
    return _reshaped(axes, arrays, lambda heads, values: (heads * n, values // n))


def joined(axes: Any, arrays: Tree, n: int) -> Tree:
    """The inverse of `cut`."""
    return _reshaped(axes, arrays, lambda heads, values: (heads // n, values * n))


def _reshaped(axes: Any, arrays: Tree, sizes: Callable[[int, int], tuple[int, int]]) -> Tree:
    def of(letters: str, x: Any) -> Any:
        at = letters.find("HV")
        if at < 0:
            return x
        return x.reshape(*x.shape[:at], *sizes(*x.shape[at : at + 2]), *x.shape[at + 2 :])

    return jax.tree.map(of, axes, arrays)
