"""Trees of parameters: the name of each parameter, and the dtype and rank for computing with it."""

import contextlib
import sys
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import PyTree

from rwkv_jax._operator import check
from rwkv_jax.models._linear import AnyWeight

Tree = TypeVar("Tree")
Leaf = TypeVar("Leaf")


def name(path: KeyPath) -> str:
    """The name of the parameter at `path`, as in `blocks.0.att.receptance.weight`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def names(params: PyTree[Leaf]) -> dict[str, Leaf]:
    """The parameters, or what another tree of their form has, by their official names, or by those
    of the stacked form."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {name(path): x for path, x in leaves}


def arrays(tree: Tree) -> Tree:
    """The tree with the array of each variable of Flax NNX, if there are any."""
    # Nothing here needs Flax, and without it there are no variables.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return tree
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, nnx.Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )


def floating(what: str, dtype: DTypeLike, more: tuple[str, ...] = ()) -> np.dtype:
    """The dtype of parameters or activations: one that the operators take, or one of `more`.

    Raises:
      TypeError: it is none of these, or one that JAX replaces by a narrower one unless 64-bit types
        are enabled. The message begins with `what`.
    """
    accepted = [x for x in (*check.DTYPES, *more) if jax.dtypes.canonicalize_dtype(x) == x]
    found: Any = repr(dtype)
    if dtype is not None:  # which numpy takes for float64
        with contextlib.suppress(TypeError):
            found = jnp.dtype(dtype)
        if str(found) in accepted:
            return found
    raise TypeError(f"{what}: dtype is {found}; accepted are {', '.join(accepted)}")


def cast(params: Tree, dtype: DTypeLike) -> Tree:
    """The parameters in `dtype`."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def like(params: Tree, x: Array) -> Tree:
    """The parameters in the dtype of `x`, but for each weight, which products take as it is.
    Vectors get leading axes of size 1 up to the rank of `x`, because broadcasting to another rank
    is an error under strict rank promotion."""

    def is_weight(p: Any) -> bool:
        return isinstance(p, AnyWeight)

    def match_shardings(p: Any) -> Any:
        if is_weight(p):
            return p
        p = p.astype(x.dtype)
        return p.reshape((1,) * (x.ndim - 1) + p.shape) if p.ndim == 1 else p

    return jax.tree.map(match_shardings, params, is_leaf=is_weight)
