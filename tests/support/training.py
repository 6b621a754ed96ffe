"""Runs of training whose steps compute nothing, or little."""

from collections.abc import Callable
from concurrent.futures import Future
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest


def measuring(
    train: ModuleType,
    patch: pytest.MonkeyPatch,
    loss: Callable[[], Any],
    norm: Callable[[], Any] = lambda: jnp.float32(1.0),
) -> None:
    """Steps compute nothing, but measure a loss and a norm of gradients."""

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        return state, train.loop.steps.Measures(loss(), norm(), jnp.float32(0.1))

    compiled: Future[Any] = Future()
    compiled.set_result(step)
    patch.setattr(train.loop, "compiled_step", lambda *_: compiled)


def without_computing(train: ModuleType, patch: pytest.MonkeyPatch) -> None:
    measuring(train, patch, lambda: jnp.float32(9.0))
    patch.setattr(train.loop, "evaluation", lambda *_: lambda _: 5.0)
    patch.setattr(train.report, "speed", lambda *_: "")
    patch.setattr(train.report, "sample", lambda *_: "")
    patch.setattr(train.report, "plot", lambda path, *_: path.touch())


def cheap_loss(model: Any, parts: Any, batch: Any, **_: Any) -> jax.Array:
    """In place of `steps.mean_loss`: a loss of a batch and all parameters that is traced and
    compiled in a moment."""
    params = parts.params
    rows = params.emb.weight[batch.tokens] + params.head.weight[batch.targets]
    mask = 1.0 if batch.mask is None else batch.mask[..., None]
    return jnp.mean(mask * jnp.sin(rows)) + sum(jnp.mean(x**2) for x in jax.tree.leaves(params))
