"""The arguments that all benchmarks take, and how they report: markdown tables and JSON."""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarking.operands import OPERATORS, Shape

DTYPES = {"cpu": "float32", "gpu": "bfloat16"}
"""The dtype of the operands on each device, if none is given."""


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("--device", choices=tuple(DTYPES), help="what JAX has, if not given")
    add("--op", choices=OPERATORS, default="wkv7")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="float32 on cpu, bfloat16 on gpu",
    )
    add(
        "--decay",
        choices=("log", "exp", "sigmoid"),
        help="form of w (not of peers); that of the official models, if not given",
    )
    add("--repeats", type=int, default=9, help="batches for each median")
    add("--json", type=Path, help="write every figure to this file")
    return parser


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, **defaults: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments, with the device that JAX has and the `defaults` for that device."""
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error("--repeats must be at least 1")
    # JAX reads this when it starts. Peers of another framework need some of the device memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.device, args.device))
    try:
        args.device = jax.default_backend()
    except (RuntimeError, AssertionError) as failure:
        parser.error(f"JAX finds no {args.device} here: {failure}")
    if args.device not in DTYPES:
        parser.error(f"no benchmark for {args.device}; --device cpu works everywhere")
    decays = OPERATORS[args.op].decays
    for name, value in {"dtype": DTYPES, **defaults}.items():
        if getattr(args, name) is None:
            setattr(args, name, value[args.device])
    args.decay = args.decay or decays[-1]
    if args.decay not in decays:
        parser.error(f"{args.op} has no decay {args.decay!r}")
    return args


def shape_of(text: str) -> Shape:
    sizes = tuple(map(int, text.removeprefix("step ").split("x")))
    if len(sizes) != 4 - text.startswith("step "):
        raise argparse.ArgumentTypeError(f"{text!r} is neither BxTxHxK nor 'step BxHxK'")
    return sizes


def label_of(shape: Shape) -> str:
    return ("step " if len(shape) == 3 else "") + "x".join(map(str, shape))


def title(args: argparse.Namespace) -> str:
    kind, cores = jax.devices()[0].device_kind, os.cpu_count()
    return f"{args.op}, {args.dtype}, {kind}, {cores} cores, jax {jax.__version__}"


class Table:
    """A markdown table, whose rows are printed as soon as they are known."""

    def __init__(self, first: str, *titles: str, widths: Sequence[int]):
        """The title of the first column, which is aligned to the left, and those of the others; the
        least widths of the first and of the others."""
        self.widths = [max(widths[0], len(first)), *(max(widths[1], len(x)) for x in titles)]
        self.row(first, *titles)
        self.row("-" * self.widths[0], *("-" * (width - 1) + ":" for width in self.widths[1:]))

    def row(self, first: str, *cells: str) -> None:
        padded = (cell.rjust(n) for cell, n in zip(cells, self.widths[1:], strict=False))
        print("|", " | ".join([first.ljust(self.widths[0]), *padded]), "|", flush=True)


def write_json(args: argparse.Namespace, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Writes all figures to the file of --json, if there is one."""
    if args.json:
        about = {"title": title(args), "decay": args.decay, **more, "rows": rows}
        args.json.write_text(json.dumps(about, indent=2) + "\n")
