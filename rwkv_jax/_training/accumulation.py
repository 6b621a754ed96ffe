"""Gradients of a batch that is computed in parts, one after another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rwkv_jax._training.data import Batch


def accumulated(
    mean_loss: Callable[[Any, Batch], jax.Array], params: Any, batch: Batch, parts: int
) -> tuple[jax.Array, Any]:
    """The mean loss of a batch and its gradients, up to rounding, by `parts` of the rows at a time,
    a divisor of their number. Memory is that of one part and of one more array for each gradient.

    `mean_loss` is the mean over the predictions that count, so a part weighs as much as it has of
    them.
    """
    if parts == 1:
        return jax.value_and_grad(mean_loss)(params, batch)
    # A part has every so many of the rows: as many of each device.
    batches = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
    weights = jnp.full(parts, 1 / parts, jnp.float32)
    if batch.mask is not None:
        counts = batches.mask.sum((1, 2)).astype(jnp.float32)
        weights = counts / jnp.maximum(counts.sum(), 1)

    def add(total: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        # Otherwise a mesh would gather the parameters of all layers before the first part.
        local, (rows, weight) = jax.lax.optimization_barrier((params, part))
        new = jax.value_and_grad(lambda params: weight * mean_loss(params, rows))(local)
        return jax.tree.map(jnp.add, total, new), None

    zeros = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, (batches, weights))[0]
