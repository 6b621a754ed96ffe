"""Time the operators on all devices against one of them, at the same size: batch, heads or sequence
distributed by `rwkv_jax.sharding.shard`.

    python scripts/bench_mesh.py --op wkv7                          # all GPUs of this machine
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python scripts/bench_mesh.py --device cpu

Both run in turn, and their results are checked before, as in bench.py. The table has the bytes of
the results of all collectives in the compiled program, for one device; their number does not depend
on how many tokens there are.
"""

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from benchmarking.operands import DIRECTIONS, Named, Operands, Shape, programs
from benchmarking.report import Table, arguments, label_of, parse, title, write_json
from benchmarking.timing import Contestant, time_in_turn
from rwkv_jax import sharding

AXES = {"batch": "BS", "heads": "HC", "sequence": "T"}
"""The axes of the operands that each kind of distribution spreads over the devices."""

SIZES = {
    "gpu": {"batch": (8, 4096, 64, 64), "heads": (8, 4096, 64, 64), "sequence": (1, 32768, 64, 64)},
    "cpu": {"batch": (2, 256, 4, 64), "heads": (2, 256, 4, 64), "sequence": (1, 1024, 4, 64)},
}
"""B, T, H, K: for one device where the batch or the sequence is distributed, for all devices where
the heads are."""

COLLECTIVE = re.compile(
    r"= (.*?) (all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast"
    r"|reduce-scatter)(?:-done)?\("
)
ARRAY = re.compile(r"\b(?:f|bf|s|u|pred)(8|16|32|64)?\[([\d,]*)\]")


def collectives_of(text: str) -> tuple[int, list[str]]:
    """The bytes of the results of all collectives in a compiled program, and their names."""
    found = COLLECTIVE.findall(text)
    sizes = (
        int(bits or 8) // 8 * math.prod(map(int, filter(None, shape.split(","))))
        for results, _ in found
        for bits, shape in ARRAY.findall(results)
    )
    return sum(sizes), sorted({name for _, name in found})


def shape_at(args: argparse.Namespace, kind: str) -> Shape:
    batch, tokens, heads, keys = SIZES[args.device][kind]
    count = len(jax.devices())
    return batch * count ** (kind == "batch"), tokens * count ** (kind == "sequence"), heads, keys


def compare(
    args: argparse.Namespace, operands: Operands, kind: str, direction: str
) -> dict[str, Any]:
    """Figures of one device and of all, for one direction."""
    mesh = jax.make_mesh((len(jax.devices()),), ("devices",), axis_types=(AxisType.Auto,))
    figures: dict[str, Any] = {}
    sequential = operands.sequential(args.decay, None)

    def placed(arrays: Named) -> Named:
        def sharding_of(name: str) -> NamedSharding:
            axes = operands.axes[name]
            return NamedSharding(mesh, P(*("devices" if x in AXES[kind] else None for x in axes)))

        return {name: jax.device_put(x, sharding_of(name)) for name, x in arrays.items()}

    def contestant(name: str, operator: Callable[..., Any]) -> Contestant:
        program = programs(functools.partial(operator, decay=args.decay))[direction]

        def start() -> list[Callable[[], Any]]:
            sets = operands.sets(args.decay)
            if name == "all":
                sets = [(placed(inputs), placed(cotangents)) for inputs, cotangents in sets]
                compiled = program.lower(*sets[0], {}).compile()
                figures["bytes"], figures["collectives"] = collectives_of(compiled.as_text())
            calls = [functools.partial(program, *arrays, {}) for arrays in sets]
            figures["error"] = operands.check(args.decay, calls[0](), sequential=sequential)
            return calls

        return Contestant(name, start)

    operator = getattr(rwkv_jax, args.op)
    distributed: dict[str, Any] = {kind: "devices"}
    one = contestant("one", operator)
    every = contestant("all", sharding.shard(operator, mesh, **distributed))
    for name, timing in time_in_turn([one, every], args.repeats).items():
        figures |= {f"{name}_ms": timing.ms, f"{name}_failure": timing.failure}
    return figures


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Time the operators on all devices and on one.")
    add = parser.add_argument
    add("--kinds", nargs="+", choices=AXES, default=list(AXES), help="what is distributed")
    args = parse(parser, argv)
    count = len(jax.devices())
    print(f"{title(args)}; {count} devices against one\n")
    figures = "1: ms", f"{count}: ms", "faster", "of ideal", "error", "bytes", "collectives"
    table = Table("distributed, size, direction", *figures, widths=(46, 9))
    rows = []
    for kind in args.kinds:
        shape = shape_at(args, kind)
        operands = Operands(args.op, shape, args.dtype)
        for direction in DIRECTIONS:
            about = {"kind": kind, "shape": label_of(shape), "direction": direction}
            row = compare(args, operands, kind, direction)
            rows.append(about | row)
            one, every, what = row["one_ms"], row["all_ms"], ", ".join(about.values())
            if one is None or every is None:
                table.row(what, row["one_failure"] or row["all_failure"])
                continue
            table.row(
                what,
                f"{one:.3f}",
                f"{every:.3f}",
                f"{one / every:.2f}",
                f"{one / every / count:.1%}",
                f"{row['error']:.1e}",
                f"{row['bytes']:,}",
                ", ".join(row["collectives"]) or "-",
            )
    write_json(args, rows)
    return int(any(row["one_failure"] or row["all_failure"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
