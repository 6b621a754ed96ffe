"""The steps of training: a training step with what it changes, and an evaluation."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax.nn.flax import RWKV, arrays
from training import copies
from training.data import Batch
from training.devices import place
from training.language_model import mean_loss


def variables(model: RWKV, optimizer: nnx.Optimizer) -> dict[str, nnx.Variable]:
    """Everything that a training step changes, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        {"model": model.params, "optimizer": optimizer.opt_state, "step": optimizer.step},
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}


class Copies(nnx.Module):
    """The copies of `training.copies` that steps compute with, from the parameters that `model` has
    now.

    Several devices have none: gradients are added up over devices, and those of copies are rounded.
    """

    def __init__(self, mesh: Mesh, model: RWKV):
        made = None
        if mesh.size == 1:
            made = jax.jit(copies.rounded, static_argnums=1)(arrays(model.params), model.dtype)
        self.tree = nnx.data(jax.tree.map(nnx.Variable, made))

    def round(self, model: RWKV) -> None:
        """Make them anew."""
        if self.tree is not None:
            made = copies.rounded(arrays(model.params), model.dtype)
            for variable, x in zip(_variables(self.tree), jax.tree.leaves(made), strict=True):
                variable[...] = x


def _variables(tree: Any) -> list[nnx.Variable]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))


@functools.partial(nnx.jit, static_argnums=(4, 5), donate_argnums=(0, 1, 2))
def train_step(
    model: RWKV,
    optimizer: nnx.Optimizer,
    own: Copies,
    batch: Batch,
    mesh: Mesh,
    l2_wrap: float = 0.0,
) -> jax.Array:
    """Change the model, the optimizer and the copies, and return the mean loss before the
    change. The arrays that they had are deleted."""

    def loss(model: RWKV) -> jax.Array:
        return mean_loss(mesh, model, batch, copies=arrays(own.tree), l2_wrap=l2_wrap)

    loss_before, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    own.round(model)
    return loss_before


def bound_train_step(
    mesh: Mesh, model: RWKV, optimizer: nnx.Optimizer, l2_wrap: float
) -> Callable[[Batch], jax.Array]:
    """`train_step` of all but the batch. It saves the milliseconds that `nnx.jit` takes at each
    call to find the variables of a model and an optimizer."""
    step = nnx.cached_partial(train_step, model, optimizer, Copies(mesh, model))
    return lambda batch: step(batch, mesh, l2_wrap)


@functools.partial(nnx.jit, static_argnums=0)
def _eval_step(mesh: Mesh, model: RWKV, batch: Batch) -> jax.Array:
    return mean_loss(mesh, model, batch)


def evaluate(mesh: Mesh, model: RWKV, held_out: Batch, rows: int) -> float:
    """The mean loss of all of `held_out`, in batches of `rows` rows. Rows of zeros, which do not
    count, fill up a batch that the mesh does not divide."""
    mask = held_out.mask
    if mask is None:
        mask = np.ones_like(held_out.tokens[:, 1:], bool)
    held_out = held_out._replace(mask=mask)
    count = len(mask)
    means, weights = [], []

    def part(first: int, last: int) -> Batch:
        padding = (0, (first - last) % mesh.shape["data"]), (0, 0)
        return jax.tree.map(lambda x: np.pad(x[first:last], padding), held_out)

    for first in range(0, count, rows):
        last = min(first + rows, count)
        means.append(float(_eval_step(mesh, model, on_mesh(part(first, last), mesh))))
        weights.append(mask[first:last].sum())
    return float(np.average(means, weights=weights))


def on_mesh(batch: Batch, mesh: Mesh) -> Batch:
    """The same batch, whose rows are distributed over the mesh."""
    rows = NamedSharding(mesh, P("data"))
    return jax.tree.map(lambda x: place(x, rows), batch)
