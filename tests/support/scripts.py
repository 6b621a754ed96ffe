"""Scripts, and the run of training, as modules."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import jax
import pytest

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
TRAIN = "rwkv_jax._training.run"


def load(name: str) -> ModuleType:
    if SCRIPTS not in sys.path:
        sys.path.append(SCRIPTS)
    return importlib.import_module(name)


@contextlib.contextmanager
def running(name: str) -> Iterator[ModuleType]:
    """A script whose functions can be called."""
    module = load(name)
    # The strictness that tests ask of the package is not asked of optax and flax.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


@pytest.fixture
def train() -> Iterator[ModuleType]:
    with running(TRAIN) as module:
        yield module


AtStep: TypeAlias = Callable[[int, Callable[[], object]], None]


@pytest.fixture
def at_step(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> AtStep:
    """Does something before `train` computes a step, when it takes the batch of that step."""
    ahead = importlib.import_module("rwkv_jax._training.ahead").Ahead
    take = ahead.take

    def at_step(step: int, action: Callable[[], object]) -> None:
        def acting(batches: Any) -> Any:
            if batches.number == step:
                action()
            return take(batches)

        monkeypatch.setattr(ahead, "take", acting)

    return at_step
