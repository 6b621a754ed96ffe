"""Time documents of different lengths: packed in rows with `segment_ids`, in a single row with
`cu_seqlens` and a state each, or each padded to the longest in a row of its own, against rows of
the same size that are one sequence each.

    python scripts/bench_packing.py --op wkv7
    python scripts/bench_packing.py --op wkv6 --shape 8x4096x64x64 --mean 256 1024

The lengths of documents are geometrically distributed; the last of a row is cut. All run in turn,
as in bench.py.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

import bench

SHAPES = {"gpu": "8x4096x64x64", "cpu": "2x1024x4x64"}
CONTESTANTS = ["whole", "segment_ids", "cu_seqlens", "padded"]
MEANS = {"gpu": [128, 512, 2048], "cpu": [128]}


def ids_of(batch: int, tokens: int, mean: int) -> np.ndarray:
    """Rows of documents with ids from 1 on."""
    rng = np.random.default_rng(mean)
    starts = rng.random((batch, tokens)) < 1 / mean
    return 1 + np.cumsum(starts, axis=1).astype(np.int32)


def lengths_of(ids: np.ndarray) -> np.ndarray:
    return np.concatenate([np.unique(row, return_counts=True)[1] for row in ids])


def programs(op: str, **options: Any) -> dict[str, Callable[..., Any]]:
    """By direction, of the inputs, the cotangents and how they are packed."""
    operator = bench.OPERATORS[op]

    def forward(inputs: Any, _: Any, packing: Any) -> Any:
        return operator.function(**inputs, **options, **packing)

    def both(inputs: Any, cotangents: Any, packing: Any) -> Any:
        results, vjp = jax.vjp(lambda inputs: forward(inputs, None, packing), inputs)
        return results, vjp(tuple(cotangents[f"d{name}"] for name in operator.results))

    return dict(zip(bench.DIRECTIONS, map(jax.jit, (forward, both)), strict=True))


def measure(args: argparse.Namespace) -> Iterator[str]:
    sizes = tuple(map(int, args.shape.split("x")))
    batch, tokens, *heads = sizes
    kinds = programs(args.op, decay=args.decay, implementation=args.implementation)

    def given(batch: int, tokens: int) -> tuple[Any, Any]:
        operands = bench.Operands(args.op, (batch, tokens, *heads), args.dtype, args.device)
        return operands.repeated(args.decay)

    def in_one_row(sequences: int) -> tuple[Any, Any]:
        """All tokens, and so many states."""
        row, states = given(1, batch * tokens), given(sequences, 1)
        names = {*operator.states, *(f"d{name}" for name in operator.results[1:])}
        inputs, cotangents = (
            {n: (y if n in names else x)[n] for n in x} for x, y in zip(row, states, strict=True)
        )
        return inputs, cotangents

    operator = bench.OPERATORS[args.op]
    whole = given(batch, tokens)
    for mean in args.mean:
        ids = ids_of(batch, tokens, mean)
        lengths = lengths_of(ids)
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        contestants = {
            "whole": (*whole, {}),
            "segment_ids": (*whole, {"segment_ids": jnp.asarray(ids)}),
            "cu_seqlens": (*in_one_row(len(lengths)), {"cu_seqlens": jnp.asarray(cu)}),
            "padded": (*given(len(lengths), int(lengths.max())), {}),
        }
        contestants = {name: contestants[name] for name in args.contestants}
        for direction, program in kinds.items():
            calls = [functools.partial(program, *operands) for operands in contestants.values()]
            ms = bench.medians(calls, args.device, args.repeats)
            yield (
                f"{mean:8}{len(lengths):11}{lengths.max():9} {direction:17}"
                + "".join(f"{x:12.3f}{x / ms[0]:7.0%}" for x in ms)
            )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time packed sequences.")
    add = parser.add_argument
    add("--device", choices=("cpu", "gpu"), help="what JAX has, if not given")
    add("--op", choices=bench.SEQUENCES, default="wkv7")
    add("--shape", help="B, T, H, K of the rows")
    add("--mean", type=int, nargs="+", help="lengths of documents")
    add("--implementation", help="the one that runs by itself, if not given")
    add("--contestants", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="as in bench.py")
    add("--repeats", type=int, default=9, help="batches for each median")
    args = parser.parse_args(argv)
    if args.device:
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(args.device, args.device))
    args.device = jax.default_backend()
    args.dtype = args.dtype or bench.DEFAULTS[args.device]["dtype"]
    args.shape = args.shape or SHAPES[args.device]
    args.mean = args.mean or MEANS[args.device]
    args.decay = bench.SEQUENCES[args.op].decays[-1]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print(
        f"{args.op}, {args.shape}, {args.dtype}, {jax.devices()[0].device_kind}, jax "
        f"{jax.__version__}; milliseconds, and of the first\n"
        f"{'mean':>8}{'documents':>11}{'longest':>9} {'':17}"
        + "".join(f"{name:>12}{'':7}" for name in args.contestants)
    )
    for line in measure(args):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
