"""The official models: those of the `rwkv` package, which computes them with PyTorch on the CPU."""

import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from rwkv_jax.models import rwkv7
from rwkv_jax.wkv4 import Wkv4State

# Both read their options while they are imported. Compiling a model takes longer than a few tokens.
os.environ |= {"PYTORCH_JIT": "0", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
torch: Any = importlib.import_module("torch")


class Run(NamedTuple):
    """The logits after each token [T, vocabulary], and the state after the last one, as trees of
    this package have it for a single row."""

    logits: np.ndarray
    state: tuple[rwkv7.BlockState, ...]


def package(version: str) -> ModuleType:
    """The module of the package with the models of a version. One import of it has RWKV-7, RWKV-7a
    or all others."""
    os.environ["RWKV_V7_ON"] = str(int(version.startswith("RWKV-7")))
    os.environ["RWKV_DE_VERSION"] = str(int(version == "RWKV-7a"))
    with warnings.catch_warnings():
        # It is decorated for the compiler of PyTorch even where this one is off.
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        return importlib.reload(importlib.import_module("rwkv.model"))


def save(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a checkpoint with torch.save."""
    torch.save({name: torch.from_numpy(x) for name, x in tensors.items()}, path)
    return path


def run(version: str, path: Path, tokens: Sequence[int], prompt: int) -> Run:
    """The first `prompt` tokens as a sequence, and the others one by one."""
    model = package(version).RWKV(str(path.with_suffix("")), "cpu fp32")
    logits, state = model.forward(list(tokens[:prompt]), None, full_output=True)
    rows = list(logits)
    for token in tokens[prompt:]:
        logits, state = model.forward([token], state)
        rows.append(logits)
    return Run(np.stack([np.asarray(row) for row in rows]), blocks(version, state))


def blocks(version: str, state: Sequence[Any]) -> tuple[rwkv7.BlockState, ...]:
    """The state of the package, a list of tensors, as a tree of this package."""
    arrays = [np.asarray(x)[None] for x in state]
    found = []
    if version == "RWKV-4":
        for shift, num, den, log_max, ffn in zip(*[iter(arrays)] * 5, strict=True):
            att = rwkv7.TimeMixState(shift, Wkv4State(num, den, log_max))
            found.append(rwkv7.BlockState(att, ffn))
        return tuple(found)
    for shift, wkv, ffn in zip(*[iter(arrays)] * 3, strict=True):
        # [H, K, V] before RWKV-7
        wkv = wkv if version.startswith("RWKV-7") else wkv.swapaxes(-1, -2)
        found.append(rwkv7.BlockState(rwkv7.TimeMixState(shift, wkv), ffn))
    return tuple(found)
