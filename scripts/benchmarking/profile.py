"""Profiles: the kernels that ran on the device, and the time of each class of kernels.

JAX writes what it has recorded as `*.xplane.pb`, which `jax.profiler.ProfileData` reads.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarking.report import Table

PRODUCTS, WKV, OURS = "products", "wkv", "other kernels of rwkv_jax"
FUSIONS, COPIES, GAPS = "memory-bound fusions", "copies", "gaps"
COLLECTIVES = "collectives"
CLASSES = (PRODUCTS, WKV, OURS, FUSIONS, COPIES, COLLECTIVES, GAPS)

PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|(?:^|_)dot(?:$|[._])", re.I)
COLLECTIVE = re.compile(
    r"nccl|all[-_]?(?:reduce|gather|to[-_]?all)|reduce[-_]?scatter|collective", re.I
)
COPY = re.compile(r"memcpy|memset|(?:^|_)copy|copy_fusion|transpose", re.I)
AROUND_WKV = re.compile(
    r"norm_?shift_?mix|wkv7_?keys|value_?residual|read_?out|cross_?entropy", re.I
)
"""The targets and kernels of `rwkv_jax` that are not those of an operator."""

OWN_PRODUCT = re.compile(
    r"row_product|feed_forward|low_rank|::(?:(?:Tiled)?Product|LowRank|Transpose)Kernel"
)
"""The targets and kernels of `rwkv_jax` that are matrix products."""

TF32 = re.compile(r"tf32|nvjet_(?:sm\d+_)?s(?!m\d)", re.I)
"""Names of kernels. The first letter after `nvjet_` is the type of the operands, s for float32."""

CONTROL = re.compile(r"(?:while|call|conditional)(?:$|[._])")
"""Names of events on a CPU that contain other events."""

LONGEST = 200
"""How many kernels are listed by name."""

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
OPERAND = re.compile(r"(?:(\w+)\[[\d,]*\](?:\{[^}]*\})? )?%([\w.\-]+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
CALLED = re.compile(r"calls=%?([\w.\-]+)")


@dataclass(frozen=True)
class Kernel:
    """A run of a kernel. Times are in nanoseconds; `instruction` is the one of the compiled program
    that started it, or empty."""

    name: str
    start: float
    end: float
    instruction: str = ""


@dataclass(frozen=True)
class Instruction:
    """An instruction of a compiled program that is a custom call or a matrix product.

    Attributes:
      target: what a custom call calls; empty for other instructions.
      product: whether it is a matrix product.
      tf32: whether it multiplies float32 matrices, which a GPU does in TF32 unless told otherwise.
    """

    target: str
    product: bool
    tf32: bool


def instructions(text: str) -> dict[str, Instruction]:
    """By name, the custom calls and the matrix products of a compiled program."""
    types: dict[str, str] = {}
    bodies: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    body = ""
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            name, result, opcode, rest = match.groups()
            types[name] = result.lstrip("(").partition("[")[0]
            bodies[body].append((name, opcode, rest))
        elif match := COMPUTATION.match(line):
            body = match[1]

    def float32(rest: str) -> bool:
        operands = OPERAND.findall(rest.partition("), ")[0])[:2]
        exact = "highest" in rest or "algorithm=dot_bf16" in rest
        return not exact and any((kind or types.get(name)) == "f32" for kind, name in operands)

    products = {
        body: [float32(rest) for _, opcode, rest in lines if opcode == "dot"]
        for body, lines in bodies.items()
    }
    found = {}
    for name, opcode, rest in (line for lines in bodies.values() for line in lines):
        called, target = CALLED.search(rest), TARGET.search(rest)
        inside = products.get(called[1], []) if called and opcode == "fusion" else []
        if opcode == "custom-call" and target:
            product = target[1].startswith(("__cublas", "__triton_gemm"))
            found[name] = Instruction(target[1], product, product and float32(rest))
        elif opcode == "dot" or inside:
            found[name] = Instruction("", True, any(inside) if inside else float32(rest))
    return found


def class_of(kernel: Kernel, program: Mapping[str, Instruction]) -> str:
    """The class of a kernel, by the instruction that started it and by its name."""
    instruction = program.get(kernel.instruction)
    target = instruction.target if instruction else ""
    if COLLECTIVE.search(kernel.name):
        return COLLECTIVES
    if OWN_PRODUCT.search(target) or OWN_PRODUCT.search(kernel.name):
        return PRODUCTS
    if "rwkv" in target or "rwkv" in kernel.name:
        return OURS if AROUND_WKV.search(target) or AROUND_WKV.search(kernel.name) else WKV
    if (instruction and instruction.product) or PRODUCT.search(kernel.name):
        return COPIES if COPY.match(kernel.name) else PRODUCTS
    return COPIES if COPY.search(kernel.name) else FUSIONS


def kernels(data: Any) -> list[Kernel]:
    """The kernels of the first device in a `jax.profiler.ProfileData`, in the order of their start.

    A GPU has a plane of its own with a line for each stream. On a CPU the kernels are the events
    that name an instruction.
    """
    planes = {plane.name: plane for plane in data.planes}
    gpu = next((name for name in sorted(planes) if name.startswith("/device:GPU")), None)
    found = []
    for plane in planes.values():
        if gpu is not None and plane.name != gpu:
            continue
        lines = list(plane.lines)
        # Other lines, such as "XLA Ops", repeat the kernels.
        streams = [line for line in lines if (line.name or "").startswith("Stream")]
        for line in streams if gpu is not None and streams else lines:
            for event in line.events:
                stats = {name: value for name, value in event.stats if name}
                instruction = str(stats.get("hlo_op", ""))
                if gpu is not None or (instruction and not CONTROL.match(instruction)):
                    start = event.start_ns
                    end = start + event.duration_ns
                    found.append(Kernel(event.name, start, end, instruction))
    return sorted(found, key=lambda kernel: kernel.start)


def busy(runs: Iterable[Kernel]) -> float:
    """The nanoseconds in which at least one of the kernels ran. They are in order of start."""
    total, until = 0.0, float("-inf")
    for kernel in runs:
        total += max(kernel.end - max(kernel.start, until), 0.0)
        until = max(until, kernel.end)
    return total


def by_class(runs: list[Kernel], program: Mapping[str, Instruction], steps: int) -> dict[str, Any]:
    """For one of `steps` steps: the milliseconds and the number of kernels of each class, those of
    products in TF32, the milliseconds in which collectives alone ran, and the kernels by name with
    the longest first. The gaps are the time between the first and the last kernel in which none
    ran."""
    ms: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    count: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
    tf32 = {"ms": 0.0, "count": 0.0}
    names: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    computing: list[Kernel] = []
    for kernel in runs:
        kind, took = class_of(kernel, program), (kernel.end - kernel.start) / 1e6 / steps
        ms[kind] += took
        count[kind] += 1 / steps
        if kind != COLLECTIVES:
            computing.append(kernel)
        instruction = program.get(kernel.instruction)
        if kind == PRODUCTS and (instruction.tf32 if instruction else TF32.search(kernel.name)):
            tf32["ms"] += took
            tf32["count"] += 1 / steps
        entry = names[kind, kernel.name]
        entry[0] += took
        entry[1] += 1 / steps
    span = max((kernel.end for kernel in runs), default=0.0) - (runs[0].start if runs else 0.0)
    ms[GAPS] = (span - busy(runs)) / 1e6 / steps
    longest = sorted(names.items(), key=lambda item: -item[1][0])
    return {
        "step_ms": span / 1e6 / steps,
        "classes": {kind: {"ms": ms[kind], "count": count[kind]} for kind in CLASSES},
        "tf32": tf32,
        "exposed_ms": (busy(runs) - busy(computing)) / 1e6 / steps,
        "kernels": [
            {"class": kind, "name": name, "ms": took, "count": times}
            for (kind, name), (took, times) in longest[:LONGEST]
        ],
    }


def of_steps(
    run: Callable[[int], Any], text: str, *, steps: int, folder: Path | None
) -> dict[str, Any]:
    """The classes of the kernels of `run(steps)`. `text` is the compiled program of a step, and the
    trace stays in `folder` unless that is None."""
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(str(place), profiler_options=options):
            jax.block_until_ready(run(steps))
        runs = newest(place)
    return by_class(runs, instructions(text), steps)


def newest(folder: Path) -> list[Kernel]:
    """The kernels of the newest profile in a folder."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise FileNotFoundError(
            f"{folder} has no .xplane.pb file, which the profiler of JAX writes"
        )
    return kernels(jax.profiler.ProfileData.from_file(str(files[-1])))


def show(title: str, found: dict[str, Any], longest: int = 12) -> None:
    """Print what `of_steps` has found: the time of each class of kernels, and the kernels that took
    the longest."""
    print()
    table = Table(title, "ms", "share", "kernels", widths=(60, 9))

    def line(name: str, ms: float, count: float) -> None:
        share = ms / found["step_ms"] if found["step_ms"] else 0.0
        table.row(name[:60], f"{ms:.2f}", f"{share:.1%}", f"{count:,.0f}")

    for kind in CLASSES:
        line(kind, **found["classes"][kind])
        if kind == PRODUCTS:
            line("  of which of float32 (TF32)", **found["tf32"])
        if kind == COLLECTIVES:
            line("  while nothing else runs", found["exposed_ms"], 0)
    line("all of it under the profiler", found["step_ms"], 0)
    for kernel in found["kernels"][:longest]:
        line(f"  {kernel['class']}: {kernel['name']}", kernel["ms"], kernel["count"])
