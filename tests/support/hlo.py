"""What a compiled or lowered program contains."""

import collections
import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
COLLECTIVE = re.compile(rf"\b({KINDS}|collective-broadcast)\b")
RESULT = re.compile(rf"= (.*?) ({KINDS})(?:-done)?\(")
ARRAY = re.compile(r"\b(?:f|bf|s|u|pred)(8|16|32|64)?\[([\d,]*)\]")
CALL = re.compile(rf"= (.*?) ({KINDS})(?:-done)?\(")
TYPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
TARGET = re.compile(r"\brwkv_\w+_v\d+\b")
DEVICES = {"cuda": ("NVIDIA H200", 1, "gpu"), "tpu": ("TPU v5 lite", 1, "tpu")}


def collectives(text: str | None) -> set[str]:
    return set(COLLECTIVE.findall(text or ""))


def targets(text: str | None) -> set[str]:
    """The native targets that a program calls."""
    return set(TARGET.findall("\n".join(x for x in (text or "").splitlines() if "custom" in x)))


def exchanged(text: str | None) -> int:
    """Bytes that the results of all collectives have."""
    return sum(itertools.chain(*exchanged_by(text).values()))


def exchanged_by(text: str | None) -> dict[str, list[int]]:
    """The bytes of each array that collectives give, by their kind."""
    found: dict[str, list[int]] = collections.defaultdict(list)
    for results, kind in RESULT.findall(text or ""):
        for bits, shape in ARRAY.findall(results):
            size = math.prod(map(int, filter(None, shape.split(","))))
            found[kind].append(int(bits or 8) // 8 * size)
    return found


def collective_results(text: str) -> collections.Counter[tuple[str, str, tuple[int, ...]]]:
    """The kind of collective, dtype and shape of each result of all collectives."""
    return collections.Counter(
        (kind, dtype, tuple(int(n) for n in shape.split(",") if n))
        for results, kind in CALL.findall(text)
        for dtype, shape in TYPE.findall(results)
    )


def partitioned(lowered: Any, folder: Path) -> str:
    """The program of each device, before the compiler makes it one for its platform."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    lowered.compile(compiler_options=options)
    (path,) = folder.glob("*after_spmd-partitioning*.txt")
    return path.read_text()


def device(platform: str, kind: str | None = None) -> AbstractContextManager:
    """One of a platform, whose kind Pallas asks for where none is here."""
    if platform not in DEVICES:
        return contextlib.nullcontext()
    usual, cores, backend = DEVICES[platform]
    own = AbstractDevice(kind or usual, cores, backend)
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=own))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, also of those inside."""
    for equation in jaxpr.eqns:
        yield equation
        for x in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(x, "jaxpr", x)
            yield from equations(inner) if hasattr(inner, "eqns") else ()


def calls(program: Any, target: str) -> int:
    """How often a program of `jax.make_jaxpr` calls a native target, in the branches of all
    platforms."""
    return sum(x.params.get("target_name") == target for x in equations(program.jaxpr))
