"""The steps of training: a training step with what it changes, and an evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax.nn.flax import RWKV
from training.devices import place
from training.language_model import mean_loss
from training.optimizer import name_of


def variables(model: RWKV, optimizer: nnx.Optimizer) -> dict[str, nnx.Variable]:
    """Everything that a training step changes, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        {"model": model.params, "optimizer": optimizer.opt_state, "step": optimizer.step},
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return {name_of(path): x for path, x in leaves}


@functools.partial(nnx.jit, static_argnums=(0, 4))
def train_step(
    mesh: Mesh, model: RWKV, optimizer: nnx.Optimizer, tokens: jax.Array, l2_wrap: float = 0.0
) -> jax.Array:
    """Change the model and the optimizer, and return the mean loss before the change."""

    def loss(model: RWKV) -> jax.Array:
        return mean_loss(mesh, model, tokens, l2_wrap=l2_wrap)

    loss_before, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return loss_before


@functools.partial(nnx.jit, static_argnums=(0, 3))
def _eval_step(mesh: Mesh, model: RWKV, tokens: jax.Array, rows: int) -> jax.Array:
    """The mean loss of the first `rows` of a batch; the other rows are padding."""
    batch, length = tokens.shape
    mask = jnp.broadcast_to(jnp.arange(batch)[:, None] < rows, (batch, length - 1))
    return mean_loss(mesh, model, tokens, mask=mask)


def evaluate(mesh: Mesh, model: RWKV, held_out: np.ndarray, batch: int) -> float:
    """The mean loss of all rows of `held_out`, in batches of `batch` rows. Rows of zeros fill up a
    batch that the mesh does not divide."""
    parts = [held_out[i : i + batch] for i in range(0, len(held_out), batch)]
    rows = NamedSharding(mesh, P("data"))
    means = []
    for part in parts:
        filled = np.pad(part, ((0, -len(part) % mesh.shape["data"]), (0, 0)))
        means.append(float(_eval_step(mesh, model, place(filled, rows), len(part))))
    return float(np.average(means, weights=[len(part) for part in parts]))
