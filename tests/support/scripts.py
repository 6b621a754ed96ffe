"""The training scripts as modules."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def running(name: str) -> Iterator[ModuleType]:
    """A script whose functions can be called."""
    module = load(name)
    # The strictness that tests ask of the package is not asked of optax and flax.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


@pytest.fixture
def train() -> Iterator[ModuleType]:
    with running("train") as module:
        yield module
