"""What a compiled or lowered program contains."""

import contextlib
import re
from contextlib import AbstractContextManager

from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

COLLECTIVE = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast)\b"
)
TARGET = re.compile(r"\brwkv_\w+_v\d+\b")
DEVICES = {"cuda": ("NVIDIA H200", 1, "gpu"), "tpu": ("TPU v5 lite", 1, "tpu")}


def collectives(text: str | None) -> set[str]:
    return set(COLLECTIVE.findall(text or ""))


def targets(text: str | None) -> set[str]:
    """The native targets that a program calls."""
    return set(TARGET.findall("\n".join(x for x in (text or "").splitlines() if "custom" in x)))


def device(platform: str) -> AbstractContextManager:
    """One of a platform, whose kind Pallas asks for where none is here."""
    if platform not in DEVICES:
        return contextlib.nullcontext()
    kind = AbstractDevice(*DEVICES[platform])
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))
