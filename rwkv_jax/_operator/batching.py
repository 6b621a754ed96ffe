"""The vmap rule of every operator: the mapped axis is folded into the batch."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap


def _fold(x: Array, axes: str, size: int, mapped: bool) -> Array:
    batch = axes.index("B")
    # Behind B, not before it: a batch sharded over devices stays where it is.
    x = jnp.moveaxis(x, 0, batch + 1) if mapped else jnp.expand_dims(x, batch + 1)
    shape = (*x.shape[: batch + 1], size, *x.shape[batch + 2 :])
    rows = shape[batch] * size
    return jnp.broadcast_to(x, shape).reshape(*shape[:batch], rows, *shape[batch + 2 :])


def _unfold(x: Array, axes: str, size: int) -> Array:
    batch = axes.index("B")
    shape = (*x.shape[:batch], x.shape[batch] // size, size, *x.shape[batch + 1 :])
    return jnp.moveaxis(x.reshape(shape), batch + 1, 0)


def batched(
    fn: Callable[..., tuple[Array, ...]], operand_axes: Sequence[str], result_axes: Sequence[str]
) -> Callable[..., tuple[Array, ...]]:
    """`fn` with a vmap rule. Operands that are not mapped are broadcast."""
    call = custom_vmap(fn)

    @call.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Array):
        if size == 0:
            operands = tuple(
                jnp.zeros_like(x, shape=(1, *x.shape[1:])) if m else x
                for x, m in zip(operands, mapped, strict=True)
            )
        folded = [
            _fold(x, axes, max(size, 1), m)
            for x, axes, m in zip(operands, operand_axes, mapped, strict=True)
        ]
        results = tuple(
            _unfold(x, axes, max(size, 1))[:size]
            for x, axes in zip(call(*folded), result_axes, strict=True)
        )
        return results, (True,) * len(results)

    return call
