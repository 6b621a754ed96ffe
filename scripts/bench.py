"""Time the operators, every implementation and the installed peers side by side.

    python scripts/bench.py                                       # the default shapes of the device
    python scripts/bench.py --device cpu --json cpu.json --plot cpu.png
    python scripts/bench.py --shapes 1x4096x32x64 --implementations ffi xla

A time is the median over batches of calls, the batches of all contestants in turn, so that drift
hits all alike. On a GPU the calls of a batch are enqueued back to back and waited for once, so that
the device is timed and not Python; on a CPU each call is waited for. Peers (rwkv-ops, and
flash-linear-attention on a GPU) are timed where they are installed, each with the form of decay
that it takes. The memory floor counts every operand and result once, the backward pass as its own
call.

Before it is timed, a contestant's results are compared with those of `implementation="reference"`
in float32 on the same operands. Where they are too far apart, the table has the error in place of
a speed. `--rates` takes other decays: those of a normally distributed number, and tokens that
forget all; with several kinds there is a line with the slowest one, in times of the first one.
"first s" is what the first call of a program takes: seconds in which it is traced and compiled, for
the most part.
"""

import argparse
import functools
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import rwkv_jax
from benchmarking.operands import DIRECTIONS, RATES, Named, Operands, Shape, options_of, programs
from benchmarking.report import Table, arguments, label_of, parse, shape_of, title, write_json
from benchmarking.timing import Contestant, copy_gb_s, reason_of, seconds, time_in_turn

SHAPES: dict[str, list[Shape]] = {
    "cpu": [(1, 1024, 12, 64)],
    "gpu": [
        (8, 4096, 64, 64),
        (1, 32768, 64, 64),
        (1, 4096, 32, 64),
        (8, 4096, 32, 128),
        (256, 64, 64),
    ],
}

LOOP_SHAPE, LOOP_TOKENS, LOOP_UNROLLS = (1, 32, 64), 1024, (1, 16)
"""One sequence is decoded inside one program, which shows the cost of calling a kernel, with so
many tokens in an iteration: a model has as many calls in one iteration as it has layers."""

SCAN_LIMIT = 8e9
"""The most bytes of states that differentiating `reference` may keep, unless it is asked for by
name."""


@dataclass(frozen=True)
class Program:
    """A contestant before it has operands."""

    name: str
    call: Mapping[str, Callable[[Any], Any] | str]
    """For each direction, a function that enqueues one call, or the reason why there is none."""
    decay: str = ""
    prepare: Callable[[Named, Named], Any] = lambda inputs, cotangents: (inputs, cotangents, {})
    """Turns inputs and cotangents into what a call takes."""
    results: Callable[[Any], Named] = dict
    """Names what a call returned."""
    clock: Callable[[Callable[[], Any]], float] = seconds
    ours: bool = False
    failed: bool = False


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
    first_s: float | None = None
    ms: float | None = None
    best_ms: float | None = None
    floor_gb_s: float | None = None
    over_floor: float | None = None
    faster_than_scan: float | None = None
    faster_than_peer: float | None = None


def in_jax(
    name: str, decay: str, shape: Shape, function: Callable[..., Any], **more: Any
) -> Program:
    """A contestant from a function with the operator's own arguments."""
    if len(shape) == 4:
        calls = {
            direction: functools.partial(lambda program, operands: program(*operands), program)
            for direction, program in programs(function).items()
        }
        return Program(name, calls, decay, **more)
    program = jax.jit(lambda state, inputs: function(**inputs, state=state), donate_argnums=0)

    def prepare(inputs: Named, _: Named) -> list[Any]:
        # Each call donates its state, and other contestants share the first one.
        state = jax.tree.map(jnp.copy, inputs["state"])
        return [state, {name: x for name, x in inputs.items() if name != "state"}]

    def call(operands: list[Any]) -> Named:
        y, operands[0] = program(*operands)
        return {"y": y, "state": operands[0]}

    return Program(name, {"forward": call}, decay, prepare, **more)


def rwkv_ops(kernel: str, op: str, shape: Shape) -> Program:
    os.environ |= {"KERAS_BACKEND": "jax", "KERNEL_TYPE": "native"}  # import compiles nothing then
    package = importlib.import_module("rwkv_ops")
    if len(shape) == 4:
        function, _ = package.get_generalized_delta_rule(shape[-1], KERNEL_TYPE=kernel)
    else:
        one_token = package.get_rnn_generalized_delta_rule(shape[-1], KERNEL_TYPE=kernel)

        def function(state: Any, **inputs: Any) -> Any:
            y, state = one_token(**{n: x[:, None] for n, x in inputs.items()}, initial_state=state)
            return y[:, 0], state

    return in_jax(f"rwkv-ops {kernel}", "exp", shape, function)


def fla(op: str, shape: Shape) -> Program:
    """flash-linear-attention, which keeps the transpose of the state."""
    names = {"wkv7": "rwkv7", "wkv6": "rwkv6", "kimi_delta_attention": "kda"}
    generation, options = names.get(op, op), {} if "delta" in op else {"scale": 1.0}
    torch, module = (
        importlib.import_module("torch"),
        importlib.import_module(f"fla.ops.{generation}"),
    )
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU")
    step = len(shape) == 3
    first, last = ("state", "state") if step else ("initial_state", "final_state")
    operator = getattr(module, f"{'fused_recurrent' if step else 'chunk'}_{generation}")

    def convert(name: str, x: jax.Array) -> Any:
        if "state" in name:
            return torch.from_dlpack(jnp.swapaxes(x, -1, -2))
        return torch.from_dlpack(x[:, None] if step and name != "u" else x)

    def prepare(inputs: Named, cotangents: Named) -> Any:
        converted = {name: convert(name, x) for name, x in inputs.items()}
        converted["initial_state"] = converted.pop(first)
        leaves = {name: x.detach().requires_grad_() for name, x in converted.items()}
        return leaves, [convert(name, cotangents[name]) for name in ("dy", f"d{last}")]

    def forward(operands: Any) -> Any:
        with torch.no_grad():
            return operator(**operands[0], **options, output_final_state=True), ()

    def backward(operands: Any) -> Any:
        leaves, cotangents = operands
        results = operator(**leaves, **options, output_final_state=True)
        gradients = torch.autograd.grad(results, list(leaves.values()), cotangents)
        return results, zip(leaves, gradients, strict=True)

    def results(called: Any) -> Named:
        y, state = called[0]
        named = {"y": y[:, 0] if step else y, last: state}
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
    return Program("fla", calls, "log", prepare, results, clock)


PEERS: dict[str, dict[str, tuple[str, Sequence[str], Callable[[str, Shape], Program]]]] = {
    "cpu": {"rwkv-ops native": ("rwkv_ops", ["wkv7"], functools.partial(rwkv_ops, "native"))},
    "gpu": {
        "rwkv-ops cuda": ("rwkv_ops", ["wkv7"], functools.partial(rwkv_ops, "cuda")),
        "rwkv-ops triton": ("rwkv_ops", ["wkv7"], functools.partial(rwkv_ops, "triton")),
        "fla": ("fla", ["wkv7", "wkv6", "gated_delta_rule", "kimi_delta_attention"], fla),
    },
}
"""For each device, the peers: the module that must be installed, the operators that the peer has,
and a function that makes a program of one."""


def contestants(args: argparse.Namespace, shape: Shape, operands: Operands) -> Iterator[Program]:
    state = sum(x.size for x in jax.tree.leaves(operands.shapes[operands.state]))
    states = 4 * operands.sizes["T"] * state
    reasons = {name: x.reason for name, x in operands.implementations(args.decay).items()}
    for name in args.implementations or reasons:
        if reason := reasons.get(name, "there is no such implementation"):
            note, failed = f"cannot run: {reason}", bool(args.implementations)
            yield Program(name, {"forward": note}, ours=True, failed=failed)
            continue
        options = {"implementation": name, **options_of(operands.op, args.decay)}
        function = functools.partial(getattr(rwkv_jax, operands.op), **options)
        program = in_jax(name, args.decay, shape, function, ours=True)
        if name == "reference" and states > SCAN_LIMIT and not args.implementations:
            reason = f"left out: it would keep {states / 1e9:.0f} GB of states"
            program = replace(program, call={**program.call, "forward+backward": reason})
        yield program
    for name, (module, ops, load) in PEERS[args.device].items():
        if importlib.util.find_spec(module) is None:
            yield Program(name, {"forward": "not installed"})
        elif args.op in ops:
            try:
                yield load(args.op, shape)
            except Exception as failure:
                yield Program(name, {"forward": reason_of(failure)}, failed=True)


def measure(args: argparse.Namespace, shape: Shape, rates: str, copy_speed: float) -> list[Row]:
    operands = Operands(args.op, shape, args.dtype, rates=rates, values=args.values)
    label = label_of(shape) + (f", V {args.values}" if args.values else "")
    label += f", {rates}" if rates != RATES[0] else ""
    found = list(contestants(args, shape, operands))
    rows: list[Row] = []

    def contestant(program: Program, call: Callable[[Any], Any], row: Row) -> Contestant:
        def start() -> list[Callable[[], Any]]:
            print(f"{row.shape} {row.direction}: {program.name}", file=sys.stderr)
            sets = [program.prepare(*x) for x in operands.sets(program.decay)]
            begin = time.perf_counter()
            results = jax.block_until_ready(program.results(call(sets[0])))
            row.first_s = time.perf_counter() - begin
            sequential = program.ours and operands.sequential(program.decay, program.name)
            row.error = operands.check(program.decay, results, sequential=sequential)
            return [functools.partial(call, x) for x in sets]

        return Contestant(program.name, start, program.clock)

    for direction in DIRECTIONS:
        floor = operands.bytes[direction] / copy_speed / 1e6
        here: dict[str, Row] = {}
        ready: list[Contestant] = []
        for program in found:
            call = program.call.get(direction)
            if call is None:
                continue
            row = Row(label, direction, program.name, program.ours, floor)
            here[program.name] = row
            if isinstance(call, str):
                row.note, row.failed = call, program.failed
            else:
                ready.append(contestant(program, call, row))
        for name, timing in time_in_turn(ready, args.repeats).items():
            row = here[name]
            row.note, row.failed = timing.failure, bool(timing.failure)
            row.ms, row.best_ms = timing.ms, timing.best_ms
        scan = here["reference"].ms if "reference" in here else None
        peer = min((row.ms for row in here.values() if row.ms and not row.ours), default=None)
        for row in here.values():
            if row.ms:
                row.floor_gb_s = operands.bytes[direction] / row.ms / 1e6
                row.over_floor = row.ms / floor
                row.faster_than_scan = scan / row.ms if scan else None
                row.faster_than_peer = peer / row.ms if peer else None
        rows += here.values()
    return rows


def loop_us(args: argparse.Namespace) -> dict[str, float | None]:
    """Microseconds for a token decoded by `wkv7_step` inside a jitted loop, for each number of
    tokens in an iteration, and for an iteration that only counts."""
    inputs, _ = Operands("wkv7", LOOP_SHAPE, args.dtype).make(args.decay)
    first = inputs.pop("v"), inputs.pop("state")

    def token(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return rwkv_jax.wkv7_step(**inputs, v=carried[0], state=carried[1], decay=args.decay)

    def loop(name: str, body: Any, unroll: int, *operands: jax.Array) -> Contestant:
        program = jax.jit(lambda *x: jax.lax.fori_loop(0, LOOP_TOKENS, body, x, unroll=unroll))
        return Contestant(name, lambda: [functools.partial(program, *operands)])

    loops = [loop(str(unroll), token, unroll, *first) for unroll in LOOP_UNROLLS]
    loops.append(loop("empty", lambda i, x: (x[0] + i,), 1, jnp.zeros((), jnp.int32)))
    timings = time_in_turn(loops, args.repeats)
    return {n: timing.ms and 1e3 * timing.ms / LOOP_TOKENS for n, timing in timings.items()}


def print_tables(rows: Sequence[Row]) -> None:
    columns = "ms", "best", "GB/s", "x floor", "vs scan", "vs peer", "error", "first s"
    for direction in DIRECTIONS:
        here = [row for row in rows if row.direction == direction]
        if not here:
            continue
        print()
        table = Table(f"{here[0].shape}, {direction}", *columns, widths=(34, 9))
        for row in here:
            if row.ms is None:
                table.row(row.contestant, row.note)
                continue
            ratios = row.faster_than_scan, row.faster_than_peer
            table.row(
                row.contestant,
                f"{row.ms:.3f}",
                f"{row.best_ms:.3f}",
                f"{row.floor_gb_s:.1f}",
                f"{row.over_floor:.2f}",
                *(f"{ratio:.2f}x" if ratio else "-" for ratio in ratios),
                f"{row.error:.1e}",
                f"{row.first_s:.1f}",
            )


def print_worst(rows: Sequence[Row]) -> None:
    """How much longer the slowest of the kinds of rates takes than the first one."""
    by_contestant: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in rows:
        if row.ms:
            times = by_contestant.setdefault((row.direction, row.contestant), [])
            times.append((row.ms, row.shape))
    for (direction, contestant), times in by_contestant.items():
        (first, _), (worst, kind) = times[0], max(times)
        print(f"{contestant}, {direction}: at worst {worst / first:.2f} x ({kind})")


def plot(rows: Sequence[Row], copy_speed: float, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows if row.ms))
    size = (12, 0.8 + 2.2 * len(shapes))
    figure, grid = pyplot.subplots(
        len(shapes), 2, figsize=size, squeeze=False, layout="constrained"
    )
    for axes, key in zip(grid.flat, ((s, p) for s in shapes for p in DIRECTIONS), strict=True):
        timed = [row for row in rows if row.ms and (row.shape, row.direction) == key][::-1]
        if not timed:
            axes.axis("off")
            continue
        times = [row.ms or 0.0 for row in timed]
        colors = ["C0" if row.ours else "C7" for row in timed]
        bars = axes.barh([row.contestant for row in timed], times, color=colors)
        axes.bar_label(bars, [f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}" for ms in times], padding=3)
        floor = timed[0].floor_ms
        axes.axvline(floor, color="C3", linestyle="--")
        right = max(times) * (max(times) / floor) ** 0.2
        label = f"ms (dashed: memory floor, {floor:.2g} ms)"
        axes.set(xscale="log", xlim=(floor / 2, right), title=", ".join(key), xlabel=label)
    figure.suptitle(f"{title}; copy {copy_speed:.0f} GB/s")
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Time the operators and their peers; exits with 1 where a result is wrong.")
    add = parser.add_argument
    shapes = "BxTxHxK, or 'step BxHxK' for one token"
    add("--shapes", type=shape_of, nargs="+", metavar="SHAPE", help=shapes)
    add("--values", type=int, metavar="V", help="value channels of a head, K if not given")
    add("--implementations", nargs="+", metavar="NAME", help="every one that can run, if not given")
    kinds = f"kinds of decay rates ({', '.join(RATES)}), 'model' if not given"
    add("--rates", nargs="+", choices=RATES, metavar="KIND", default=RATES[:1], help=kinds)
    add("--plot", type=Path, help="write a picture (PNG) to this file")
    args = parse(parser, argv, shapes=SHAPES)
    about, copy_speed = title(args), copy_gb_s()
    print(f"{about}; a copy runs at {copy_speed:.1f} GB/s", flush=True)
    rows: list[Row] = []
    for shape in args.shapes:
        here: list[Row] = []
        for rates in args.rates:
            here += (table := measure(args, shape, rates, copy_speed))
            print_tables(table)
        if len(args.rates) > 1:
            print_worst(here)
        rows += here
    loop = loop_us(args) if args.op == "wkv7" else None
    write_json(
        args,
        [asdict(row) for row in rows],
        copy_gb_s=copy_speed,
        loop_us=loop,
        build=rwkv_jax.build_info(),
    )
    if args.plot and any(row.ms for row in rows):
        plot(rows, copy_speed, about, args.plot)
    if loop:
        _, heads, keys = LOOP_SHAPE
        us = {name: "-" if x is None else f"{x:.2f}" for name, x in loop.items()}
        print(f"\none token of one sequence, {heads} heads of {keys}, inside a jitted loop:")
        for tokens in LOOP_UNROLLS:
            print(f"  {us[str(tokens)]} us with {tokens} in an iteration")
        print(f"  ({us['empty']} us for an iteration that only counts)")
    return int(any(row.failed and row.ours for row in rows))


if __name__ == "__main__":
    sys.exit(main())
