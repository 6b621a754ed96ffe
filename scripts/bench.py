"""Time the operators, every implementation and the installed peers side by side.

    python scripts/bench.py                                       # the default shapes of the device
    python scripts/bench.py --device cpu --json cpu.json --plot cpu.png
    python scripts/bench.py --shapes 1x4096x32x64 --implementations ffi xla

A time is the median over batches of calls, the batches of all contestants in turn, so that drift
hits all alike. On a GPU the calls of a batch are enqueued back to back and waited for once, so that
the device is timed and not Python; on a CPU each call is waited for. Peers (rwkv-ops, and
flash-linear-attention on a GPU) are timed where they are installed, each in the form of decay that
it takes. The memory floor counts every operand and result once, the backward pass as its own call.

Operands repeat a small case of tests/support/cases.py over batch, heads and time. That case is
compared with the float64 oracle, and every repetition in the timed result with the small one; where
either fails, an error is printed in place of a speed.
"""

import argparse
import functools
import importlib
import importlib.util
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before JAX starts: leave device memory to the peers of another framework.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The tests' folder and not the repository's, so that the installed package is timed.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import numpy as np

import rwkv_jax

BENCH_SHAPES, Case = (
    getattr(importlib.import_module("support.cases"), n) for n in ("BENCH_SHAPES", "Case")
)
OPERATORS, SEQUENCES, library, sequential = (
    getattr(importlib.import_module("support.operators"), n)
    for n in ("OPERATORS", "SEQUENCES", "library", "sequential")
)
tolerance = importlib.import_module("support.tolerance")

STEPS = {op: f"{op}_step" for op in SEQUENCES}
"""The operators, and the one for a single token that belongs to each."""

STEP_SHAPES = {"step 256x64x64": (256, 64, 64)}
"""Decoding, [B, H, K]."""

LOOP_HEADS, LOOP_KEYS, LOOP_TOKENS, LOOP_UNROLLS = 32, 64, 1024, (1, 16)
"""One sequence decoded inside one program, where what a call of a kernel costs shows, with so many
tokens in an iteration: a model has as many calls in one as it has layers."""

DEFAULTS = {
    "cpu": {"dtype": "float32", "shapes": ["1x1024x12x64"]},
    "gpu": {"dtype": "bfloat16", "shapes": [*list(BENCH_SHAPES)[:4], *STEP_SHAPES]},
}
TOKENS, HEADS = 1024, 2
"""Size of the case that is checked, at most."""

SCAN_LIMIT = 8e9
"""Bytes of states that differentiating `reference` may keep, if it is not asked for by name."""

BATCH_SECONDS = {"cpu": 0.02, "gpu": 0.2}
CACHE = 256e6
"""Operands smaller than this are rotated on a GPU, so that none is found in its cache."""

DIRECTIONS = ("forward", "forward+backward")

Arrays = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """One contestant. `call` enqueues one call on what `prepare` returned."""

    name: str
    decay: str
    prepare: Callable[[Arrays, Arrays], Any]
    call: Mapping[str, Callable[[Any], Any]]
    results: Callable[[Any], dict[str, jax.Array]]
    clock: Callable[[Callable[[], Any]], float]
    ours: bool = False


def library_of(op: str) -> Any:
    """The package's description of an operator or of its step."""
    return library(op.removesuffix("_step"))


def axes_of(op: str) -> dict[str, str]:
    """The axes of all operands, results, cotangents and gradients."""
    described = library_of(op)
    step = op in STEPS.values()
    arguments = described.step_arguments if step else described.arguments
    results = (described.step if step else described.reference).results
    return {f"{d}{n}": x for d in ("", "d") for n, x in (arguments | dict(results)).items()}


@dataclass
class Row:
    shape: str
    direction: str
    contestant: str
    ours: bool
    floor_ms: float = 0.0
    error: float | None = None
    note: str = ""
    failed: bool = False
    ms: float | None = None
    best_ms: float | None = None
    floor_gb_s: float | None = None
    over_floor: float | None = None
    faster_than_scan: float | None = None
    faster_than_peer: float | None = None


def seconds(loop: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(loop())
    return time.perf_counter() - start


def medians(calls: Sequence[Callable[[], Any]], device: str, repeats: int) -> list[float]:
    """Of batches of each call, which run in turn, the median milliseconds of a call."""

    def batch(call: Callable[[], Any], count: int) -> float:
        def loop() -> Any:
            for _ in range(count - 1):
                result = call()
                if device == "cpu":  # has no queue that would bound what is kept
                    jax.block_until_ready(result)
            return call()

        return seconds(loop) / count

    def ready(call: Callable[[], Any]) -> Callable[[], float]:
        jax.block_until_ready(call())
        count = max(1, int(BATCH_SECONDS[device] / batch(call, 2)))
        return functools.partial(batch, call, count)

    batches = [ready(call) for call in calls]
    samples = [[run() for run in batches] for _ in range(repeats)]
    return [1e3 * statistics.median(x) for x in zip(*samples, strict=True)]


def in_jax(name: str, decay: str, op: str, function: Callable[..., Any], **more: Any) -> Program:
    """A contestant from a function of the operator's own operands, in its own layout."""
    step, operator = op in STEPS.values(), OPERATORS[op]

    def forward(states: Arrays, inputs: Arrays, _: Arrays) -> dict[str, Any]:
        return dict(zip(operator.results, function(**inputs, **states), strict=True))

    def backward(states: Arrays, inputs: Arrays, cotangents: Arrays) -> dict[str, Any]:
        results, vjp = jax.vjp(lambda s, x: forward(s, x, {}), states, inputs)
        dstates, gradients = vjp({result: cotangents[f"d{result}"] for result in results})
        return results | {f"d{name}": x for name, x in (gradients | dstates).items()}

    def prepare(inputs: Arrays, cotangents: Arrays) -> list[Any]:
        # Donation takes an array away, and other contestants share it.
        states = {n: jnp.copy(inputs[n]) if step else inputs[n] for n in operator.states}
        rest = {name: x for name, x in inputs.items() if name not in states}
        return [states, rest, cotangents]

    def call(program: Callable[..., Any], operands: list[Any]) -> dict[str, Any]:
        results = program(*operands)
        if step:
            operands[0] = {name: results[name] for name in operator.states}
        # Calls that a CPU has been handed may run side by side.
        return jax.block_until_ready(results) if jax.default_backend() == "cpu" else results

    programs = {"forward": jax.jit(forward, donate_argnums=(0,) if step else ())}
    if not step:
        programs["forward+backward"] = jax.jit(backward)
    calls = {name: functools.partial(call, program) for name, program in programs.items()}
    # A step's state goes on to the next call, which donates it: a reader needs its own.
    results = functools.partial(jax.tree.map, jnp.copy) if step else dict
    return Program(name, decay, prepare, calls, results, seconds, **more)


def rwkv_ops(kernel: str, op: str, keys: int) -> Program | None:
    if library_of(op).name != "wkv7":
        return None
    os.environ |= {"KERAS_BACKEND": "jax", "KERNEL_TYPE": "native"}  # import compiles nothing then
    package = importlib.import_module("rwkv_ops")
    if op == "wkv7":
        function, _ = package.get_generalized_delta_rule(keys, KERNEL_TYPE=kernel)
    else:
        one_token = package.get_rnn_generalized_delta_rule(keys, KERNEL_TYPE=kernel)

        def function(state: Any, **inputs: Any) -> Any:
            y, state = one_token(**{n: x[:, None] for n, x in inputs.items()}, initial_state=state)
            return y[:, 0], state

    return in_jax(f"rwkv-ops {kernel}", "exp", op, function)


def fla(op: str, keys: int) -> Program | None:
    """flash-linear-attention, which keeps the transpose of the state."""
    generation = {"wkv7": "rwkv7", "wkv6": "rwkv6"}.get(library_of(op).name)
    if generation is None:
        return None
    torch, module = (
        importlib.import_module("torch"),
        importlib.import_module(f"fla.ops.{generation}"),
    )
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")
    step = op in STEPS.values()
    operator = getattr(module, f"{'fused_recurrent' if step else 'chunk'}_{generation}")

    def convert(name: str, x: jax.Array) -> Any:
        if "state" in name:
            return torch.from_dlpack(jnp.swapaxes(x, -1, -2))
        return torch.from_dlpack(x[:, None] if step and name not in OPERATORS[op].shared else x)

    def prepare(inputs: Arrays, cotangents: Arrays) -> Any:
        converted = {name: convert(name, x) for name, x in inputs.items()}
        converted["initial_state"] = converted.pop("state" if step else "initial_state")
        leaves = {name: x.detach().requires_grad_() for name, x in converted.items()}
        names = [f"d{name}" for name in OPERATORS[op].results]
        return leaves, [convert(name, cotangents[name]) for name in names]

    def forward(operands: Any) -> Any:
        with torch.no_grad():
            return operator(**operands[0], scale=1.0, output_final_state=True), ()

    def backward(operands: Any) -> Any:
        leaves, cotangents = operands
        results = operator(**leaves, scale=1.0, output_final_state=True)
        gradients = torch.autograd.grad(results, list(leaves.values()), cotangents)
        return results, zip(leaves, gradients, strict=True)

    def results(called: Any) -> dict[str, jax.Array]:
        y, state = called[0]
        named = {"y": y[:, 0] if step else y, OPERATORS[op].results[1]: state}
        named |= {f"d{name}": x for name, x in called[1]}
        torch.cuda.synchronize()
        arrays = {n: jnp.from_dlpack(x.detach().contiguous()) for n, x in named.items()}
        return {
            name: jnp.swapaxes(x, -1, -2) if "state" in name else x for name, x in arrays.items()
        }

    def clock(loop: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loop()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    calls = {"forward": forward} if step else {"forward": forward, "forward+backward": backward}
    return Program("fla", "log", prepare, calls, results, clock)


PEERS: dict[str, dict[str, tuple[str, Callable[[str, int], Program | None]]]] = {
    "cpu": {"rwkv-ops native": ("rwkv_ops", functools.partial(rwkv_ops, "native"))},
    "gpu": {
        "rwkv-ops cuda": ("rwkv_ops", functools.partial(rwkv_ops, "cuda")),
        "rwkv-ops triton": ("rwkv_ops", functools.partial(rwkv_ops, "triton")),
        "fla": ("fla", fla),
    },
}
"""For each device, the peers: the module that has to be there, and what makes a program of it, or
None of an operator that it lacks."""


class Operands:
    """The operands of one shape, in any form of decay, and what the oracle says of a small case."""

    def __init__(self, op: str, sizes: Sequence[int], dtype: str, device: str):
        self.op, self.step, self.axes = op, op in STEPS.values(), axes_of(op)
        batch, tokens, heads, keys = (sizes[0], 1, *sizes[1:]) if self.step else sizes
        self.full = Case(batch, tokens, heads, keys, dtype=dtype)
        self.tokens, self.heads = min(tokens, TOKENS), math.gcd(heads, HEADS)
        self.small = functools.cache(self._small)
        self.sets = functools.cache(self._sets)
        inputs, cotangents = jax.eval_shape(lambda: self.repeated("log"))
        size = {name: x.size * x.dtype.itemsize for name, x in (inputs | cotangents).items()}
        operands, results = (sum(size[n] for n in names) for names in (inputs, cotangents))
        self.inputs = {name: inputs[name] for name in self.small("log")[0]}  # JAX sorts the names
        self.bytes = {
            "forward": operands + results,
            "forward+backward": 3 * operands + 2 * results,
        }
        self.rotation = math.ceil(CACHE / operands) if device == "gpu" else 1

    def _small(self, decay: str, seed: int = 0) -> tuple[Arrays, Arrays, Arrays]:
        """Inputs, cotangents, and what is expected."""
        full = self.full
        case = Case(1, self.tokens, self.heads, full.K, dtype=full.dtype, decay=decay, seed=seed)
        inputs, cotangents = OPERATORS[self.op].make(case)
        return inputs, cotangents, OPERATORS[self.op].oracle(inputs, decay, cotangents)

    def repeated(self, decay: str, seed: int = 0) -> tuple[Arrays, Arrays]:
        full, copies = self.full, self.full.H // self.heads
        times = {"B": full.B, "T": math.ceil(full.T / self.tokens), "H": copies, "C": copies}

        @jax.jit
        def repeat(named: Arrays) -> Arrays:
            repeated = {
                name: jnp.tile(x, [times.get(letter, 1) for letter in self.axes[name]])
                for name, x in named.items()
            }
            return {
                name: x[:, : full.T] if "T" in self.axes[name] else x
                for name, x in repeated.items()
            }

        inputs, cotangents, _ = self.small(decay, seed)
        return repeat(inputs), repeat(cotangents)

    def _sets(self, decay: str) -> list[tuple[Arrays, Arrays]]:
        return [self.repeated(decay, seed) for seed in range(self.rotation)]

    def check(self, program: Program, direction: str, operands: Any) -> tuple[float, str]:
        """The error, and what is wrong if it is too large."""
        inputs, cotangents, expected = self.small(program.decay)
        named = ({n: jnp.asarray(x) for n, x in part.items()} for part in (inputs, cotangents))
        results = program.results(program.call[direction](program.prepare(*named)))
        expected = {name: expected[name] for name in results}
        ceilings = {
            name: tolerance.ceiling(
                name,
                self.full.dtype,
                sequential=program.ours and sequential(self.op, program.name, inputs),
                highest=False,
            )
            for name in results
        }
        outputs = set(OPERATORS[self.op].results)
        error = max(
            tolerance.rms_error(np.asarray(x), expected[name])
            for name, x in results.items()
            if (name in outputs) == (direction == "forward")
        )
        try:
            tolerance.assert_close(
                {name: np.asarray(x) for name, x in results.items()}, expected, ceilings
            )
        except AssertionError as wrong:
            return error, str(wrong)
        for name, x in program.results(program.call[direction](operands)).items():
            axes = self.axes[name]
            axis = next(axes.index(letter) for letter in "HC" if letter in axes)
            if name == "y" and not self.step:
                x = x[:, : self.tokens]
            small = results[name]
            if "B" not in axes or (name != "y" and self.tokens < self.full.T):
                first = x[:1] if "B" in axes else x
                small = jax.lax.slice_in_dim(first, 0, small.shape[axis], axis=axis)
            distance = float(copies_differ(x, small, axis))
            if not distance <= 2 * ceilings[name]:
                return (
                    error,
                    f"{name}: at the full size, heads with equal operands are {distance:.3g} off",
                )
        return error, ""


@functools.partial(jax.jit, static_argnums=2)
def copies_differ(x: jax.Array, small: jax.Array, axis: int) -> jax.Array:
    """The largest relative distance between `small` and a repetition of it in `x`."""
    size = small.shape[axis]
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]).astype(jnp.float32)
    small = jnp.expand_dims(small, axis).astype(jnp.float32)
    others = tuple(i for i in range(x.ndim) if i not in (0, axis))
    return jnp.sqrt(jnp.max(jnp.sum((x - small) ** 2, others)) / jnp.sum(small**2))


def contestants(
    args: argparse.Namespace, operands: Operands, shape: str
) -> Iterator[tuple[Program, str] | Row]:
    """Programs with the reason why a gradient is left out, or a row that says why there is none."""
    op, full = operands.op, operands.full
    platform = {"gpu": "cuda"}.get(args.device, args.device)
    reasons = rwkv_jax.implementations(
        op, *operands.inputs.values(), decay=args.decay, platform=platform
    )
    for name in args.implementations or reasons:
        reason = reasons.get(name, "there is no such implementation")
        if reason:
            failed = bool(args.implementations)
            yield Row(shape, DIRECTIONS[0], name, True, note=f"cannot run: {reason}", failed=failed)
            continue
        options = {"decay": args.decay, "implementation": name}
        function = functools.partial(OPERATORS[op].function, **options)
        state = sum(operands.inputs[name].size for name in OPERATORS[op].states)
        states = 4 * full.T * state
        large = name == "reference" and states > SCAN_LIMIT and not args.implementations
        left_out = f"left out: it would keep {states / 1e9:.0f} GB of states" if large else ""
        yield in_jax(name, args.decay, op, function, ours=True), left_out
    for name, (module, load) in PEERS[args.device].items():
        if importlib.util.find_spec(module) is None:
            yield Row(shape, DIRECTIONS[0], name, False, note="not installed")
            continue
        try:
            program = load(op, full.K)
            if program is not None:
                yield program, ""
        except Exception as failure:
            yield Row(shape, DIRECTIONS[0], name, False, note=reason_of(failure), failed=True)


def reason_of(failure: Exception) -> str:
    lines = str(failure).strip().splitlines()
    return f"failed: {type(failure).__name__}: {lines[0][:200] if lines else ''}"


def batch(program: Program, direction: str, sets: list[Any], calls: int) -> float:
    """Seconds for one call, from a batch of them."""

    def loop() -> Any:
        results = None
        for i in range(calls):
            results = program.call[direction](sets[i % len(sets)])
        return results

    return program.clock(loop) / calls


def measure(args: argparse.Namespace, shape: str, copy_speed: float) -> list[Row]:
    op = STEPS[args.op] if shape in STEP_SHAPES else args.op
    operands = Operands(op, (BENCH_SHAPES | STEP_SHAPES)[shape], args.dtype, args.device)
    found = list(contestants(args, operands, shape))
    rows = [row for row in found if isinstance(row, Row)]
    programs = [entry for entry in found if not isinstance(entry, Row)]
    for direction in DIRECTIONS:
        ready: list[tuple[Row, Callable[[], float]]] = []
        here: list[Row] = []
        floor = operands.bytes[direction] / copy_speed / 1e6
        for program, left_out in programs:
            if direction not in program.call:
                continue
            row = Row(shape, direction, program.name, program.ours, floor)
            here.append(row)
            if left_out and direction == "forward+backward":
                row.note = left_out
                continue
            print(f"{shape} {direction}: {program.name}", file=sys.stderr)
            try:
                sets = [program.prepare(*s) for s in operands.sets(program.decay)]
                row.error, wrong = operands.check(program, direction, sets[0])
                if wrong:
                    row.note, row.failed = f"WRONG: {wrong}", True
                    continue
                batch(program, direction, sets, 1)
                calls, target = 1, BATCH_SECONDS[args.device]
                while (took := calls * batch(program, direction, sets, calls)) < target / 4:
                    calls *= 2
                calls = math.ceil(calls * target / took)
                ready.append((row, functools.partial(batch, program, direction, sets, calls)))
            except Exception as failure:
                row.note, row.failed = reason_of(failure), True
        times = [[run() for _, run in ready] for _ in range(args.repeats)]
        for (row, _), samples in zip(ready, zip(*times, strict=True), strict=False):
            ms = 1e3 * statistics.median(samples)
            row.ms, row.best_ms = ms, 1e3 * min(samples)
            row.floor_gb_s = operands.bytes[direction] / ms / 1e6
            row.over_floor = ms / floor
        scan = next((row.ms for row in here if row.contestant == "reference"), None)
        peer = min((row.ms for row in here if row.ms and not row.ours), default=None)
        for row in here:
            if row.ms:
                row.faster_than_scan = scan / row.ms if scan else None
                row.faster_than_peer = peer / row.ms if peer else None
        rows += here
    return rows


def loop_us(args: argparse.Namespace) -> dict[str, float]:
    """Microseconds for a token decoded by `wkv7_step` inside a jitted loop, for each number of
    tokens in an iteration, and for an iteration that only counts."""
    case = Case(1, 1, LOOP_HEADS, LOOP_KEYS, dtype=args.dtype, decay=args.decay)
    inputs, _ = OPERATORS["wkv7_step"].make(case)
    state, v = inputs.pop("state"), inputs.pop("v")

    def token(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, state = rwkv_jax.wkv7_step(**inputs, v=carried[0], state=carried[1], decay=args.decay)
        return y, state

    def microseconds(body: Callable[[int, Any], Any], unroll: int, *operands: jax.Array) -> float:
        program = jax.jit(lambda *x: jax.lax.fori_loop(0, LOOP_TOKENS, body, x, unroll=unroll))
        samples = [seconds(lambda: program(*operands)) for _ in range(1 + args.repeats)]
        return 1e6 * statistics.median(samples[1:]) / LOOP_TOKENS

    operands = jnp.asarray(v), jnp.asarray(state)
    times = {str(n): microseconds(token, n, *operands) for n in LOOP_UNROLLS}
    empty = microseconds(lambda i, x: (x[0] + i,), 1, jnp.zeros((), jnp.int32))
    return times | {"empty": empty}


def copy_gb_s(device: str) -> float:
    """The speed of a large copy on the device, bytes read plus bytes written."""
    size = {"cpu": 2**26, "gpu": 2**28}[device]
    copy = jax.jit(lambda source, _: -source, donate_argnums=1, keep_unused=True)
    source, target = jnp.ones(size), jnp.ones(size)

    def loop() -> jax.Array:
        nonlocal target
        for _ in range(10):
            target = copy(source, target)
        return target

    seconds(loop)
    return 10 * 8 * size / statistics.median(seconds(loop) for _ in range(5)) / 1e9


def table(rows: Sequence[Row]) -> Iterator[str]:
    columns = "ms", "best", "GB/s", "x floor", "vs scan", "vs peer", "error"
    for shape, direction in dict.fromkeys((row.shape, row.direction) for row in rows):
        yield ""
        yield f"{shape + ', ' + direction:36}" + "".join(f"{column:>10}" for column in columns)
        for row in (row for row in rows if (row.shape, row.direction) == (shape, direction)):
            if row.ms is None:
                yield f"  {row.contestant:20}{row.note}"
                continue
            ratios = (
                f"{r:.2f}x" if r else "-" for r in (row.faster_than_scan, row.faster_than_peer)
            )
            speed = (
                f"{row.ms:.3f}",
                f"{row.best_ms:.3f}",
                f"{row.floor_gb_s:.1f}",
                f"{row.over_floor:.2f}",
            )
            cells = *speed, *ratios, f"{row.error:.1e}"
            yield f"  {row.contestant:34}" + "".join(f"{cell:>10}" for cell in cells)


def plot(rows: Sequence[Row], copy_speed: float, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = list(dict.fromkeys((row.shape, row.direction) for row in rows if row.ms))
    shapes = list(dict.fromkeys(shape for shape, _ in panels))
    size = (12, 0.8 + 2.2 * len(shapes))
    figure, grid = pyplot.subplots(
        len(shapes), 2, figsize=size, squeeze=False, layout="constrained"
    )
    for axes, key in zip(grid.flat, ((s, p) for s in shapes for p in DIRECTIONS), strict=True):
        timed = [row for row in rows if row.ms and (row.shape, row.direction) == key][::-1]
        if not timed:
            axes.axis("off")
            continue
        times = np.array([row.ms for row in timed])
        colors = ["C0" if row.ours else "C7" for row in timed]
        bars = axes.barh([row.contestant for row in timed], times, color=colors)
        axes.bar_label(bars, [f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}" for ms in times], padding=3)
        floor = timed[0].floor_ms
        axes.axvline(floor, color="C3", linestyle="--")
        right = times.max() * (times.max() / floor) ** 0.2
        label = f"ms (dashed: memory floor, {floor:.2g} ms)"
        axes.set(xscale="log", xlim=(floor / 2, right), title=", ".join(key), xlabel=label)
    figure.suptitle(f"{title}; copy {copy_speed:.0f} GB/s")
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time the operators and their peers; exits with 1 where a result is wrong."
    )
    add = parser.add_argument
    names = [*BENCH_SHAPES, *STEP_SHAPES]
    add("--device", choices=("cpu", "gpu"), help="what JAX has, if not given")
    add("--op", choices=STEPS, default="wkv7")
    add("--shapes", nargs="+", choices=names, metavar="SHAPE", help=f"of {', '.join(names)}")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="float32 on cpu, bfloat16 on gpu",
    )
    add(
        "--decay",
        choices=("log", "exp", "sigmoid"),
        help="form of w (not peers'); that of the official models, if not given",
    )
    add("--implementations", nargs="+", metavar="NAME", help="every one that can run, if not given")
    add("--repeats", type=int, default=9, help="batches for each median")
    add("--json", type=Path, help="write every figure to this file")
    add("--plot", type=Path, help="write a picture (PNG) to this file")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    if args.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.device, args.device))
    try:
        args.device = jax.default_backend()
    except (RuntimeError, AssertionError) as failure:
        parser.error(f"JAX finds no {args.device} here: {failure}")
    if args.device not in DEFAULTS:
        parser.error(f"no benchmark for {args.device}; --device cpu works everywhere")
    args.dtype = args.dtype or DEFAULTS[args.device]["dtype"]
    args.decay = args.decay or SEQUENCES[args.op].decays[-1]
    if args.decay not in SEQUENCES[args.op].decays:
        parser.error(f"{args.op} has no decay {args.decay!r}")
    args.shapes = args.shapes or DEFAULTS[args.device]["shapes"]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    kind, copy_speed = jax.devices()[0].device_kind, copy_gb_s(args.device)
    title = f"{args.op}, {args.dtype}, {kind}, {os.cpu_count()} cores, jax {jax.__version__}"
    print(f"{title}; a copy runs at {copy_speed:.1f} GB/s", flush=True)
    rows = []
    for shape in args.shapes:
        rows += (here := measure(args, shape, copy_speed))
        print(*table(here), sep="\n", flush=True)
    loop = loop_us(args) if args.op == "wkv7" else None
    if args.json:
        about = {"title": title, "decay": args.decay, "copy_gb_s": copy_speed, "loop_us": loop}
        about |= {"build": rwkv_jax.build_info(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(about, indent=2) + "\n")
    if args.plot and any(row.ms for row in rows):
        plot(rows, copy_speed, title, args.plot)
    if loop:
        print(
            f"\none token of one sequence, {LOOP_HEADS} heads of {LOOP_KEYS}, inside a jitted loop:"
        )
        for tokens in LOOP_UNROLLS:
            print(f"  {loop[str(tokens)]:.2f} us with {tokens} in an iteration")
        print(f"  ({loop['empty']:.2f} us for an iteration that only counts)")
    return int(any(row.failed and row.ours for row in rows))


if __name__ == "__main__":
    sys.exit(main())
