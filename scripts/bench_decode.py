"""Time decoding with RWKV-7 language models: milliseconds a token, tokens/s, and how many times the
floor that is. With --generate, also `generate`; with --prefill, also the reading of a prompt.

    python scripts/bench_decode.py                      # the rows of this device
    python scripts/bench_decode.py --rows 32x4096x1 24x2048x256 --profile
    python scripts/bench_decode.py --rows 12x768x1xfloat32 --prefill 2048 --peak 0.1
    python scripts/bench_decode.py --device cpu --processor-time --json decode.json
    python scripts/bench_decode.py --rows 24x2048x1 --generate 256
    python scripts/bench_decode.py --zeros 0 50 88      # what zeros in the channel mixing save
    python scripts/bench_decode.py --plot decode.png --rows 12x768x1 12x768x4 12x768x16

A row is LAYERSxWIDTHxBATCH, and the dtype of the weights may follow. The most probable token is
taken each time, inside one jitted loop whose state is donated. The model has random parameters, and
each row runs in a process of its own.

The floor is the time in which the device copies as many bytes as a token needs: all weights are
read once, but of the embedding the rows of the tokens alone, and all states are read and written.
The speed of a copy is measured in the same process. With --zeros, the parameters are those of
`models.for_decoding`, and the weights are made so that the channel mixings have this share of
zeros, which trained models have by themselves: the floor then counts what the zeros leave to read.
With --generate N, `generate` samples N tokens of each row with top_p, and its speed is given as a
share of that of the loop. With --prefill, the share of the peak counts 2 operations for each number
of a matrix, and 8 for each number of a state. Prompts are read one right after another, unless
there is a --pause.
"""

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import jax

from benchmarking import decoding, profile
from benchmarking.decoding import WEIGHTS, Figures, Row, Settings
from benchmarking.processes import apart
from benchmarking.report import DTYPES, Table
from benchmarking.timing import reason_of

ROWS = {
    "cpu": tuple(Row(12, 768, 1, weights) for weights in ("float32", "bfloat16", "int8")),
    "gpu": (
        *(Row(32, 4096, batch, "bfloat16") for batch in (1, 32, 256)),
        *(Row(24, 2048, batch, "bfloat16") for batch in (1, 256, 960)),
        Row(32, 4096, 1, "int8"),
        Row(24, 2048, 1, "int8"),
    ),
}
"""The rows that are timed on each device, if none are given."""

TOKENS = {"cpu": 8, "gpu": 64}
"""How many tokens are decoded in one program on each device, if that is not given."""


def row_of(text: str) -> Row:
    """The row in an argument, with no dtype if none is given."""
    sizes, weights = text.split("x")[:3], text.split("x")[3:]
    try:
        layers, width, batch = map(int, sizes)
        (dtype,) = weights or ("",)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxWIDTHxBATCH[xDTYPE]") from None
    if dtype not in ("", *WEIGHTS):
        raise argparse.ArgumentTypeError(f"{dtype!r} is none of {', '.join(WEIGHTS)}")
    return Row(layers, width, batch, dtype)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=tuple(ROWS), help="what JAX has, if not given")
    add(
        "--rows",
        type=row_of,
        nargs="+",
        metavar="LAYERSxWIDTHxBATCH[xDTYPE]",
        help="the rows of ROWS for the device, if not given; weights have the dtype --dtype, if "
        f"none of {', '.join(WEIGHTS)} is given",
    )
    add("--vocabulary", type=int, default=65536, help="different tokens (default: 65536)")
    add("--dtype", help="dtype of the activations (default: float32 on cpu, bfloat16 on gpu)")
    add("--tokens", type=int, help="tokens decoded in one program (default: 8 on cpu, 64 on gpu)")
    add("--repeats", type=int, default=5, help="how often it runs; the median counts (default: 5)")
    add(
        "--processor-time",
        action="store_true",
        help="count the processor time in place of the clock, on a CPU that others use as well",
    )
    add(
        "--zeros",
        type=float,
        nargs="+",
        metavar="PERCENT",
        help="time each row with weights made so that so many percent of max(K x, 0)^2 are zeros",
    )
    add(
        "--fused",
        action=argparse.BooleanOptionalAction,
        help='decode with kernels="fused", the CUDA kernels of whole blocks for one token, or '
        "never with them; with kernels=None, if neither is given",
    )
    add(
        "--invariant",
        type=int,
        metavar="ROWS",
        help="decode and read prompts with models.Invariant, so many rows at once",
    )
    add("--generate", type=int, default=0, metavar="N", help="also generate N tokens with top_p")
    add("--prefill", type=int, default=0, metavar="T", help="also read a prompt of T tokens")
    add(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="idle so long before each prompt: one right after another may meet the limit of power",
    )
    add("--peak", type=float, default=989.0, help="peak TFLOP/s of the device (default: 989)")
    add("--profile", action="store_true", help="print the time of each class of kernels")
    add("--traces", type=Path, help="keep the traces of --profile in this folder")
    add("--one-process", action="store_true", help="run all rows in this process")
    add("--json", type=Path, help="write every figure to this file")
    add("--plot", type=Path, help="draw tokens/s against the batch, with the floors (PNG)")
    args = parser.parse_args(argv)
    # JAX reads this when it starts, also in the processes of the rows.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.device:
        platform = "cuda" if args.device == "gpu" else "cpu"
        os.environ["JAX_PLATFORMS"] = platform
        jax.config.update("jax_platforms", platform)
    args.device = jax.default_backend()
    if args.device not in ROWS:
        parser.error(f"no rows for {args.device}; --device cpu works everywhere")
    args.dtype = args.dtype or DTYPES[args.device]
    args.tokens = TOKENS[args.device] if args.tokens is None else args.tokens
    if args.processor_time and args.device != "cpu":
        parser.error("--processor-time is for --device cpu")
    if min(args.tokens, args.repeats, args.vocabulary) < 1 or min(args.generate, args.prefill) < 0:
        parser.error(
            "--tokens, --repeats and --vocabulary must be at least 1, --generate and --prefill 0"
        )
    if not 0 <= args.pause < math.inf:
        parser.error("--pause must be at least 0")
    if args.invariant is not None and args.invariant < 1:
        parser.error("--invariant must be at least 1")
    if not all(0 <= percent <= 100 for percent in args.zeros or ()):
        parser.error("--zeros must be from 0 to 100")
    shares = [percent / 100 for percent in args.zeros] if args.zeros else [None]
    rows = args.rows or ROWS[args.device]
    args.rows = [
        row._replace(weights=row.weights or args.dtype, zeros=share)
        for row in rows
        for share in shares
    ]
    return args


def measure(args: argparse.Namespace, row: Row) -> list[Figures]:
    """The figures of a row, or the reason why there are none."""
    settings = Settings(
        vocabulary=args.vocabulary,
        dtype=args.dtype,
        tokens=args.tokens,
        repeats=args.repeats,
        processor_time=args.processor_time,
        blocks=None if args.fused is None else "fused" if args.fused else "separate",
        invariant=args.invariant,
        generated=args.generate,
        prefill=args.prefill,
        pause=args.pause,
        peak=1e12 * args.peak,
        profile=args.profile,
        traces=args.traces,
    )
    print(row, file=sys.stderr)
    try:
        if args.one_process:
            return decoding.measure(row, settings)
        return apart(decoding.measure, row, settings)
    except Exception as failure:
        traceback.print_exc()
        return [{**row._asdict(), "pass": "decoding", "failure": reason_of(failure)}]


def print_rows(table: Table, row: Row, rows: Sequence[Figures]) -> None:
    for figures in rows:
        name = f"{row}, {figures['pass']}"
        if "failure" in figures:
            table.row(name, figures["failure"])
            continue
        cells = [f"{figures['ms']:.2f}", f"{figures['tokens_per_second']:,.0f}"]
        if figures["pass"] == "decoding":
            cells += [f"{figures['bytes'] / 1e9:.3f}", f"{figures['copy_gb_s']:,.0f}"]
            cells += [f"{figures['floor_ms']:.2f}", f"{figures['times_floor']:.2f}", *"--"]
        elif figures["pass"] == "generate":
            cells += [*"----", f"{figures['share_of_loop']:.1%}", "-"]
        else:
            cells += [*"-----", f"{figures['share_of_peak']:.1%}"]
        table.row(name, *cells)


def plot(rows: Sequence[Figures], path: Path) -> None:
    """The tokens/s of each size and dtype, drawn against the batch, and dashed those at the
    floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    timed = [f for f in rows if "failure" not in f and f["pass"] == "decoding"]
    for alike in dict.fromkeys(row_of_figures(f)._replace(batch=0) for f in timed):
        here = [f for f in timed if row_of_figures(f)._replace(batch=0) == alike]
        here.sort(key=lambda f: f["batch"])
        batches = [f["batch"] for f in here]
        name = str(alike).replace(", batch 0", "")
        (line,) = axes.plot(batches, [f["tokens_per_second"] for f in here], "o-", label=name)
        floors = [1e3 * f["batch"] / f["floor_ms"] for f in here]
        axes.plot(batches, floors, "--", color=line.get_color())
    batches = sorted({f["batch"] for f in timed})
    axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s (dashed: floor)")
    axes.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axes.set_xticks([], minor=True)
    axes.legend()
    figure.savefig(path, dpi=120)


def row_of_figures(figures: Figures) -> Row:
    return Row(*(figures[name] for name in Row._fields))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print(
        f"RWKV-7, {args.dtype} activations, vocabulary {args.vocabulary}, {args.device}, "
        f"jax {jax.__version__}"
    )
    if args.zeros:
        print("The weights are made so that the channel mixings have the named share of zeros.")
    print()
    titles = ["ms", "tokens/s", "GB a token", "copy GB/s", "floor ms", "times floor"]
    titles += ["of loop", "of peak"]
    table = Table("layers x width, batch, weights, pass", *titles, widths=(48, 8))
    rows: list[Figures] = []
    for row in args.rows:
        rows += (here := measure(args, row))
        print_rows(table, row, here)
    for figures in rows:
        if "profile" in figures:
            part = "one token" if figures["pass"] == "decoding" else "a prompt"
            profile.show(f"{row_of_figures(figures)}, {part}", figures["profile"])
    if args.json:
        about = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"options": about, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return int(any("failure" in figures for figures in rows))


if __name__ == "__main__":
    sys.exit(main())
