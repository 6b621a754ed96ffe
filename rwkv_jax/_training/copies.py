"""Copies of matrices in the dtype of the activations.

The model rounds the matrices of its blocks, and those of adapters, to that dtype. A step of
training that rounds them where it changes them, and leaves the copies to the next step, saves that
step from reading every parameter once more.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

Tree = TypeVar("Tree")


def rounded(params: Tree, dtype: DTypeLike) -> Tree:
    """The parameters of RWKV-7 and of adapters, or a tree that has them, with a copy in `dtype` of
    each that the model does nothing with but multiply by activations of `dtype`, and None in place
    of all others."""

    def copy(path: KeyPath, x: Array) -> Array | None:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        of_block = ".blocks." in f".{name}" and x.ndim == 2
        multiplies = of_block and not name.endswith((".r_k", ".s_emb.weight"))
        return x.astype(dtype) if multiplies and x.dtype != dtype else None

    return jax.tree_util.tree_map_with_path(copy, params)


def in_place(params: Tree, copies: Tree) -> Tree:
    """The parameters, of which the copies take the place. Gradients are those of the parameters."""
    return jax.tree.map(
        lambda copy, x: x if copy is None else _instead(copy, x),
        copies,
        params,
        is_leaf=lambda x: x is None,
    )


def places(copies: Tree, of_params: Any) -> Tree:
    """Of a tree like that of the parameters, what belongs to the copies."""
    return jax.tree.map(
        lambda copy, place: None if copy is None else place,
        copies,
        of_params,
        is_leaf=lambda x: x is None,
    )


@jax.custom_vjp
def _instead(copy: Array, x: Array) -> Array:
    return copy


_instead.defvjp(
    lambda copy, x: (copy, jnp.zeros((), x.dtype)), lambda like, dx: (None, dx.astype(like.dtype))
)
