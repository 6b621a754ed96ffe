"""Time training steps of RWKV-7 language models: milliseconds, share of the peak of the device,
memory, compilation and, with --profile, the kernels by class.

    python scripts/bench_model.py                    # four sizes, from 0.1B to the layers of 7.2B
    python scripts/bench_model.py --rows 24x2048x4 --forward --profile
    python scripts/bench_model.py --rows 12x768x16 --model implementation=xla --json step.json
    python scripts/bench_model.py --rows 24x2048x4 --model recompute=blocks

A step has bfloat16 activations, float32 parameters, and AdamW inside the jitted program, whose
arguments are donated. The model has random parameters and reads random tokens. Each row runs in a
process of its own, because only then the largest number of bytes in use and the time to compile are
those of the row. The products are those of cuBLAS, as in train.py;
XLA_FLAGS=--xla_gpu_enable_triton_gemm=true lets XLA choose.

With --official DIR, each row is also timed with the training code of RWKV-LM: a checkout of
https://github.com/BlinkDL/RWKV-LM, whose CUDA kernels torch compiles, with bfloat16 parameters and
the fused AdamW of torch. This needs torch, nvcc and ninja, but neither lightning nor deepspeed.

The operations of a token are 6 for each number of a matrix other than the embedding, and 24 for
each number of a state. Operations of a backward pass that computes values again do not count.
"""

import argparse
import ast
import inspect
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

from benchmarking import model_step, official, profile
from benchmarking.model_step import Figures, Row, Settings
from benchmarking.processes import apart
from benchmarking.report import Table
from benchmarking.timing import reason_of
from rwkv_jax._training import xla_flags
from rwkv_jax.models import Kernels, rwkv7

COMPILATION = ("trace_s", "lower_s", "compile_s")
ROWS = (Row(24, 2048, 4), Row(12, 768, 16), Row(24, 1024, 8), Row(8, 4096, 4))


def row_of(text: str) -> Row:
    try:
        return Row(*map(int, text.split("x")))
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxWIDTHxBATCH") from None


def model_option(text: str) -> tuple[str, Any]:
    """An argument of `rwkv7.apply`, as NAME=VALUE, with `implementation` and `layers` in place of
    `kernels`. The value is a Python literal or a word."""
    name, _, value = text.partition("=")
    arguments = {*inspect.signature(rwkv7.apply).parameters}
    accepted = sorted(arguments - {"kernels"} | {"implementation", "layers"})
    if name not in accepted:
        raise argparse.ArgumentTypeError(f"the model takes no {name!r}; it takes {accepted}")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def official_option(text: str) -> tuple[str, str]:
    """An option of the official code, as NAME=VALUE."""
    name, _, value = text.partition("=")
    try:
        official.options_of({name: value})
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, value


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Time training steps of RWKV-7 language models.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--rows",
        type=row_of,
        nargs="+",
        default=ROWS,
        metavar="LAYERSxWIDTHxBATCH",
        help="the four sizes of ROWS, if not given",
    )
    add("--tokens", type=int, default=4096, help="tokens in each row of the batch")
    add("--vocabulary", type=int, default=65536, help="different tokens")
    add("--dtype", default="bfloat16", help="dtype of the activations")
    add("--implementation", help="implementation of wkv7; the best one if not given")
    add(
        "--model",
        type=model_option,
        nargs="+",
        default=(),
        metavar="NAME=VALUE",
        help="further arguments of the model",
    )
    add("--l2-wrap", type=float, default=0.0, help="factor of the L2 wrap, 1e-4 in RWKV-LM")
    add("--steps", type=int, default=10, help="steps that are timed together")
    add("--repeats", type=int, default=3, help="how often they are timed; the median counts")
    add("--peak", type=float, default=989.0, help="peak TFLOP/s of the device")
    add("--forward", action="store_true", help="time the forward pass as well")
    add("--profile", action="store_true", help="print the time of each class of kernels")
    add("--traces", type=Path, help="keep the traces of --profile in this folder")
    add("--deterministic", action="store_true", help="with deterministic kernels, as train.py has")
    add("--official", type=Path, metavar="DIR", help="time a checkout of RWKV-LM on the same rows")
    add(
        "--official-options",
        type=official_option,
        nargs="+",
        default=(),
        metavar="NAME=VALUE",
        help="its options: kernel, head_chunk, grad_cp and jit",
    )
    add("--one-process", action="store_true", help="run all rows in this process")
    add("--json", type=Path, help="write every figure to this file")
    add("--plot", type=Path, help="draw the share of the peak against the width (PNG)")
    args = parser.parse_args(argv)
    if min(args.steps, args.repeats, args.tokens, args.vocabulary) < 1:
        parser.error("--steps, --repeats, --tokens and --vocabulary must be at least 1")
    if args.official:
        try:
            official.folder_of(args.official)
        except FileNotFoundError as failure:
            parser.error(str(failure))
    return args


def settings_of(args: argparse.Namespace) -> Settings:
    # Every option of the model is in this dictionary and goes to `rwkv7.apply`.
    model = {"dtype": args.dtype, "implementation": args.implementation, **dict(args.model)}
    model["kernels"] = Kernels(model.pop("implementation"), model.pop("layers", None))
    return Settings(
        tokens=args.tokens,
        vocabulary=args.vocabulary,
        model=model,
        l2_wrap=args.l2_wrap,
        steps=args.steps,
        repeats=args.repeats,
        peak=1e12 * args.peak,
        forward=args.forward,
        profile=args.profile,
        traces=args.traces,
    )


def measure(args: argparse.Namespace, row: Row, *, of_official: bool = False) -> list[Figures]:
    """The figures of a row, of this package or of the official code, or the reason why there are
    none."""
    name = "training, official" if of_official else "training"
    print(f"{row}, {name}", file=sys.stderr)
    settings = settings_of(args)
    try:
        if of_official:
            return apart(
                official.measure, row, settings, args.official, dict(args.official_options)
            )
        if args.one_process:
            return model_step.measure(row, settings)
        return apart(model_step.measure, row, settings)
    except Exception as failure:
        traceback.print_exc()
        return [{**row._asdict(), "pass": name, "failure": reason_of(failure)}]


def print_rows(table: Table, row: Row, rows: Sequence[Figures]) -> None:
    def gigabytes(size: int | None) -> str:
        return "-" if size is None else f"{size / 1e9:.1f}"

    for figures in rows:
        name = f"{row}, {figures['pass']}"
        if "failure" in figures:
            table.row(name, figures["failure"])
            continue
        table.row(
            name,
            f"{figures['ms']:.1f}",
            f"{figures['best_ms']:.1f}",
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['share_of_peak']:.1%}",
            *(gigabytes(figures.get(f"{x}_bytes")) for x in ("argument", "temporary", "peak")),
            *(f"{figures[key]:.1f}" if key in figures else "-" for key in COMPILATION),
        )


def plot(rows: Sequence[Figures], path: Path) -> None:
    """The share of the peak of each row, drawn against the width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    timed = [figures for figures in rows if "failure" not in figures]
    for name in dict.fromkeys(figures["pass"] for figures in timed):
        here = sorted((f for f in timed if f["pass"] == name), key=lambda f: f["width"])
        widths, shares = [f["width"] for f in here], [f["share_of_peak"] for f in here]
        axes.plot(widths, shares, marker="o", label=name)
    widths = sorted({figures["width"] for figures in timed})
    axes.set(xscale="log", ylim=(0, None), xlabel="width", ylabel="share of peak")
    axes.set_xticks(widths, [str(width) for width in widths], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.legend()
    figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    xla_flags.add(xla_flags.CUBLAS, *([xla_flags.DETERMINISTIC] if args.deterministic else []))
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # of the memory of a GPU
    print(
        f"RWKV-7, {args.dtype}, {args.tokens} tokens a row, vocabulary {args.vocabulary}, "
        f"peak {args.peak:g} TFLOP/s\n"
    )
    titles = ["ms", "best", "tokens/s", "of peak", "arguments GB", "temporaries GB", "peak GB"]
    titles += ["trace s", "lower s", "compile s"]
    table = Table("layers x width, batch, pass", *titles, widths=(34, 8))
    rows: list[Figures] = []
    for row in args.rows:
        rows += (here := measure(args, row))
        print_rows(table, row, here)
        if args.official:
            rows += (here := measure(args, row, of_official=True))
            print_rows(table, row, here)
    if args.profile:
        for figures in rows:
            if "profile" in figures:
                row = Row(*(figures[name] for name in Row._fields))
                profile.show(f"{row}, one training step", figures["profile"])
    if args.json:
        about = {name: str(value) for name, value in vars(args).items()}
        args.json.write_text(json.dumps({"options": about, "rows": rows}, indent=1) + "\n")
    if args.plot:
        plot(rows, args.plot)
    return int(any("failure" in figures for figures in rows))


if __name__ == "__main__":
    sys.exit(main())
