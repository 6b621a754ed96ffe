"""Time the product of a few rows with a matrix on a CPU, by the kernel and by XLA: microseconds,
and how many times as fast the kernel is. `MAX_ROWS` of rwkv_jax/models/_row_product.py follows
from it.

    python scripts/bench_row_product.py
    python scripts/bench_row_product.py --matrices 4096x4096 --weights int8 --rows 1 8 32

A matrix is OUTPUTSxINPUTS. Calls go through several matrices, which the caches do not hold.
"""

import argparse
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarking.report import Table
from benchmarking.timing import Contestant, time_in_turn
from rwkv_jax.models import _row_product

MATRICES = ("768x768", "3072x768", "65536x768")
BYTES = 2**27
"""How many bytes the matrices of a row of the table have at least."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--matrices", nargs="+", default=MATRICES, metavar="OUTPUTSxINPUTS")
    dtypes = tuple(_row_product.MAX_ROWS)
    add("--weights", nargs="+", choices=dtypes, default=("float32", "bfloat16", "int8"))
    add("--rows", type=int, nargs="+", default=(4, 8, 16, 32))
    add("--repeats", type=int, default=5, help="batches of calls; the median counts (default: 5)")
    args = parser.parse_args(argv)
    if min(args.repeats, *args.rows) < 1:
        parser.error("--rows and --repeats must be at least 1")
    jax.config.update("jax_platforms", "cpu")
    return args


def calls(
    multiply: Callable[..., Any], rows: int, outputs: int, inputs: int, dtype: str
) -> list[Callable[[], Any]]:
    """Calls with different matrices."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, inputs), np.float32))
    first = rng.integers(-127, 128, (outputs, inputs), np.int8)
    scale = jnp.ones((outputs, 1)) if dtype == "int8" else None
    count = -(-BYTES // (first.size * jnp.dtype(dtype).itemsize))
    matrices = [jnp.array(first, dtype) for _ in range(count)]
    program = jax.jit(multiply)
    return [functools.partial(program, x, matrix, scale) for matrix in matrices]


def kernel(x: Any, weight: Any, scale: Any) -> Any:
    return _row_product.by_kernel(x, weight, scale, jnp.float32)


def xla(x: Any, weight: Any, scale: Any) -> Any:
    return _row_product.by_compiler(x, weight, scale, jnp.float32)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    print(f"{os.cpu_count()} cores, jax {jax.__version__}\n")
    table = Table("matrix, weights, rows", "kernel us", "xla us", "times", widths=(26, 9))
    for matrix in args.matrices:
        outputs, inputs = map(int, matrix.split("x"))
        for dtype in args.weights:
            for rows in args.rows:
                timings = time_in_turn(
                    [
                        Contestant(
                            of.__name__, functools.partial(calls, of, rows, outputs, inputs, dtype)
                        )
                        for of in (kernel, xla)
                    ],
                    args.repeats,
                )
                name = f"{matrix}, {dtype}, {rows}"
                if failures := [x.failure for x in timings.values() if x.failure]:
                    table.row(name, *failures)
                    return 1
                ours, theirs = (1e3 * (x.ms or 0) for x in timings.values())
                table.row(name, f"{ours:.0f}", f"{theirs:.0f}", f"{theirs / ours:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
