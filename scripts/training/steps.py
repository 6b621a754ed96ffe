"""The steps of training: the optimizer and what it changes, a training step and an evaluation."""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from rwkv_jax.nn.flax import RWKV7
from training.devices import place
from training.language_model import mean_loss


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    """AdamW as in the official training: matrices decay, and `w0` learns at twice the rate."""
    schedule = optax.warmup_cosine_decay_schedule(
        0,
        args.learning_rate,
        args.warmup,
        max(args.steps, args.warmup + 1),
        args.learning_rate / 20,
    )

    def where(
        condition: Callable[[str, jax.Array], bool],
    ) -> Callable[[PyTree[jax.Array]], PyTree[bool]]:
        def mask(params: PyTree[jax.Array]) -> PyTree[bool]:
            return jax.tree_util.tree_map_with_path(
                lambda path, x: condition(_name(path), x), params
            )

        return mask

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(0.9, 0.99, eps=1e-18),
        optax.add_decayed_weights(
            args.weight_decay, where(lambda name, x: "weight" in name and x.ndim == 2)
        ),
        optax.masked(optax.scale(2.0), where(lambda name, x: "w0" in name)),
        optax.scale_by_learning_rate(schedule),
    )


def variables(model: RWKV7, optimizer: nnx.Optimizer) -> dict[str, nnx.Variable]:
    """Everything that a training step changes, by name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        {"model": model.params, "optimizer": optimizer.opt_state, "step": optimizer.step},
        is_leaf=lambda x: isinstance(x, nnx.Variable),
    )
    return {_name(path): x for path, x in leaves}


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


@functools.partial(nnx.jit, static_argnums=(0, 4))
def train_step(
    mesh: Mesh, model: RWKV7, optimizer: nnx.Optimizer, tokens: jax.Array, l2_wrap: float = 0.0
) -> jax.Array:
    """Change the model and the optimizer, and return the mean loss before the change."""

    def loss(model: RWKV7) -> jax.Array:
        return mean_loss(mesh, model, tokens, l2_wrap=l2_wrap)

    loss_before, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return loss_before


@functools.partial(nnx.jit, static_argnums=(0, 3))
def _eval_step(mesh: Mesh, model: RWKV7, tokens: jax.Array, rows: int) -> jax.Array:
    """The mean loss of the first `rows` of a batch; the other rows are padding."""
    batch, length = tokens.shape
    mask = jnp.broadcast_to(jnp.arange(batch)[:, None] < rows, (batch, length - 1))
    return mean_loss(mesh, model, tokens, mask=mask)


def evaluate(mesh: Mesh, model: RWKV7, held_out: np.ndarray, batch: int) -> float:
    """The mean loss of all rows of `held_out`, in batches of `batch` rows. Rows of zeros fill up a
    batch that the mesh does not divide."""
    parts = [held_out[i : i + batch] for i in range(0, len(held_out), batch)]
    rows = NamedSharding(mesh, P("data"))
    means = []
    for part in parts:
        filled = np.pad(part, ((0, -len(part) % mesh.shape["data"]), (0, 0)))
        means.append(float(_eval_step(mesh, model, place(filled, rows), len(part))))
    return float(np.average(means, weights=[len(part) for part in parts]))
