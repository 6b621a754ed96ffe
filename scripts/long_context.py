"""Time training steps on rows that are longer than memory: nanoseconds for each token, and memory.

    python scripts/long_context.py               # a small model, on a CPU as well
    python scripts/long_context.py --row 24x2048x1 --vocabulary 65536 --dtype bfloat16 \\
        --tokens 16384 131072 1048576 --piece 16384

The model reads a row in pieces, as `losses.in_pieces` and `train.py --piece` do: with exact
gradients, for which the backward pass computes each piece again, and with gradients that stop at
the states between pieces. A step has AdamW inside the jitted program, as in bench_model.py. Each
line of the table is measured in a process of its own.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from bench_model import row_of
from benchmarking import model_step
from benchmarking.model_step import Figures, Row, Settings
from benchmarking.processes import apart
from benchmarking.report import Table
from benchmarking.timing import reason_of
from rwkv_jax._training import xla_flags
from rwkv_jax._training.options import positive
from rwkv_jax.models import Kernels


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time training steps on rows that are longer than memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--row", type=row_of, default=Row(2, 64, 1), help="LAYERSxWIDTHxBATCH")
    add("--tokens", type=positive, nargs="+", default=(512, 4096), help="tokens in each row")
    add("--piece", type=positive, default=256, help="tokens of a row that are read at once")
    add("--gradients", choices=("exact", "truncated"), nargs="+", default=("exact", "truncated"))
    add("--vocabulary", type=positive, default=256, help="different tokens")
    add("--dtype", default="float32", help="dtype of the activations")
    add("--implementation", help="implementation of wkv7; the best one if not given")
    add("--recompute", choices=("mixes", "cheap", "blocks"), help="as train.py takes it")
    add("--steps", type=positive, default=1, help="steps that are timed together")
    add("--repeats", type=positive, default=2, help="how often they are timed; the median counts")
    add("--one-process", action="store_true", help="measure all in this process")
    add("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    if wrong := [x for x in args.tokens if x % args.piece]:
        parser.error(f"--tokens has {wrong[0]}; accepted are multiples of --piece, {args.piece}")
    return args


def measure(args: argparse.Namespace, tokens: int, gradients: str) -> Figures:
    """The figures of a step, or the reason why there are none."""
    about = {"tokens": tokens, "gradients": gradients}
    settings = Settings(
        tokens=tokens,
        vocabulary=args.vocabulary,
        model={
            "dtype": args.dtype,
            "kernels": Kernels(args.implementation),
            "recompute": args.recompute,
        },
        pieces={"piece": args.piece, "truncate": gradients == "truncated"},
        steps=args.steps,
        repeats=args.repeats,
        warm_up=1,  # a step may take a minute
    )
    try:
        one = model_step.measure
        (figures,) = one(args.row, settings) if args.one_process else apart(one, args.row, settings)
    except Exception as failure:
        return about | {"failure": reason_of(failure)}
    return about | figures


def cells(figures: Figures) -> list[str]:
    if "failure" in figures:
        return [figures["failure"]]
    sizes = (figures[f"{name}_bytes"] for name in ("argument", "temporary", "peak"))
    return [
        f"{1e9 / figures['tokens_per_second']:,.0f}",
        f"{figures['tokens_per_second']:,.0f}",
        *("-" if size is None else f"{size / 1e9:.3f}" for size in sizes),
        f"{figures['compile_s']:.1f}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    xla_flags.add(xla_flags.CUBLAS)
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # of the memory of a GPU
    print(f"RWKV-7 {args.row}, {args.dtype}, pieces of {args.piece:,} tokens\n")
    titles = ["ns a token", "tokens/s", "arguments GB", "temporaries GB", "peak GB", "compile s"]
    table = Table("tokens, gradients", *titles, widths=(20, 10))
    rows: list[Figures] = []
    for tokens in args.tokens:
        for gradients in args.gradients:
            rows.append(figures := measure(args, tokens, gradients))
            table.row(f"{tokens:,}, {gradients}", *cells(figures))
    if args.json:
        about = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"options": about, "rows": rows}, indent=1) + "\n")
    return int(any("failure" in figures for figures in rows))


if __name__ == "__main__":
    sys.exit(main())
