"""Time documents of different lengths: packed in rows with `segment_ids`, in a single row with
`cu_seqlens` and a state each, or each padded to the longest in a row of its own, against rows of
the same size that are one sequence each.

    python scripts/bench_packing.py --op wkv7
    python scripts/bench_packing.py --op wkv6 --shape 8x4096x64x64 --mean 256 1024

The lengths of documents are geometrically distributed; the last document of a row is cut. All
contestants run in turn, and their results are checked before, as in bench.py. A percentage is a
time relative to the first contestant's.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import jax.numpy as jnp
import numpy as np

import rwkv_jax
from benchmarking.operands import Named, Operands, Shape, programs
from benchmarking.report import Table, arguments, label_of, parse, shape_of, title, write_json
from benchmarking.timing import Contestant, time_in_turn

SHAPES = {"gpu": (8, 4096, 64, 64), "cpu": (2, 1024, 4, 64)}
MEANS = {"gpu": [128, 512, 2048], "cpu": [128]}
CONTESTANTS = ["whole", "segment_ids", "cu_seqlens", "padded"]


def ids_of(batch: int, tokens: int, mean: int) -> np.ndarray:
    """Rows of documents with ids from 1 on."""
    rng = np.random.default_rng(mean)
    starts = rng.random((batch, tokens)) < 1 / mean
    return 1 + np.cumsum(starts, axis=1).astype(np.int32)


def lengths_of(ids: np.ndarray) -> np.ndarray:
    return np.concatenate([np.unique(row, return_counts=True)[1] for row in ids])


def packings(args: argparse.Namespace, ids: np.ndarray) -> dict[str, Operands]:
    """For each contestant, the operands in which the documents `ids` are packed its way."""
    batch, tokens, *heads = args.shape
    lengths = lengths_of(ids)
    cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    shapes: dict[str, tuple[Shape, Named]] = {
        "whole": (args.shape, {}),
        "segment_ids": (args.shape, {"segment_ids": jnp.asarray(ids)}),
        "cu_seqlens": ((1, batch * tokens, *heads), {"cu_seqlens": jnp.asarray(cu)}),
        "padded": ((len(lengths), int(lengths.max()), *heads), {}),
    }
    return {
        name: Operands(args.op, shape, args.dtype, packing)
        for name, (shape, packing) in shapes.items()
        if name in args.contestants
    }


def contestant(args: argparse.Namespace, name: str, operands: Operands, program: Any) -> Contestant:
    def start() -> list[Callable[[], Any]]:
        sets = operands.sets(args.decay)
        calls = [functools.partial(program, *arrays, operands.packing) for arrays in sets]
        sequential = operands.sequential(args.decay, args.implementation)
        operands.check(args.decay, calls[0](), sequential=sequential)
        return calls

    return Contestant(name, start)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("Time packed sequences.")
    add = parser.add_argument
    add("--shape", type=shape_of, metavar="BxTxHxK", help="of the rows")
    add("--mean", type=int, nargs="+", help="lengths of documents")
    add("--implementation", help="the one that runs by itself, if not given")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    args = parse(parser, argv, shape=SHAPES, mean=MEANS)
    options = {"decay": args.decay, "implementation": args.implementation}
    kinds = programs(functools.partial(getattr(rwkv_jax, args.op), **options))

    print(f"{title(args)}; {label_of(args.shape)}; milliseconds, and of the first\n")
    names = "direction", "mean", "documents", "longest"
    table = Table(*names, *args.contestants, widths=(16, 14))
    batch, tokens, *_ = args.shape
    rows: list[dict[str, Any]] = []
    for mean in args.mean:
        ids = ids_of(batch, tokens, mean)
        lengths = lengths_of(ids)
        packed = packings(args, ids)
        for direction, program in kinds.items():
            timings = time_in_turn(
                [contestant(args, name, packed[name], program) for name in args.contestants],
                args.repeats,
            )
            about = direction, mean, len(lengths), int(lengths.max())
            rows.append(
                dict(zip(names, about, strict=True))
                | {"contestants": {name: asdict(timing) for name, timing in timings.items()}}
            )
            first, *_ = (timing.ms for timing in timings.values())
            table.row(
                *map(str, about),
                *(
                    f"{x.ms:.3f}" + (f"{x.ms / first:7.0%}" if first else "") if x.ms else x.failure
                    for x in timings.values()
                ),
            )
    write_json(args, rows, shape=label_of(args.shape))
    return int(any(x["failure"] for row in rows for x in row["contestants"].values()))


if __name__ == "__main__":
    sys.exit(main())
