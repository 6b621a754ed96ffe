"""The memory that a gradient needs beside its operands and results."""

import math
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from support import internals
from support.cases import BENCH_SHAPES, Case
from support.operators import Run, available

pytestmark = pytest.mark.quick("run", "op")

# So many heads that no GPU splits a sequence, which costs scratch up to a bound.
HEADS, SIZE = 192, 64
AXES = {"B": 1, "H": HEADS, "K": SIZE, "V": SIZE, "C": HEADS * SIZE}
RUNS = [
    pytest.param(
        Run(op, implementation),
        marks=[pytest.mark.slow] * (implementation == "xla"),
        id=f"{op}-{implementation}",
    )
    for op in ("wkv7", "wkv6", "wkv4")
    for implementation in available(op, Case(1, 16, 1, SIZE))
    if implementation == "ffi" or (op == "wkv7" and implementation != "reference")
]


def _shapes(arrays: Mapping[str, str], tokens: int) -> list[Any]:
    sizes = {**AXES, "T": tokens}
    shapes = ([sizes[letter] for letter in axes] for axes in arrays.values())
    return [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]


def _memory(run: Run, tokens: int) -> Any:
    operands = _shapes(internals.axes_of_arguments(run.op), tokens)
    cotangents = _shapes(internals.axes_of_results(run.op), tokens)

    def gradients(operands: list, cotangents: list) -> tuple:
        results, vjp = jax.vjp(lambda *xs: run(*xs), *operands)
        return *results, *vjp(tuple(cotangents))

    return jax.jit(gradients).lower(operands, cotangents).compile().memory_analysis()


@pytest.mark.parametrize("run", RUNS)
def test_backward_memory_grows_with_chunks_not_with_tokens(run: Run) -> None:
    """One saved state in 64 tokens, and a few arrays the size of the operands."""
    short, long = (_memory(run, tokens) for tokens in (1024, 2048))
    grown = long.temp_size_in_bytes - short.temp_size_in_bytes
    operands = long.argument_size_in_bytes - short.argument_size_in_bytes
    state = sum(4 * math.prod(x.shape) for x in _shapes(internals.axes_of_state(run.op), 0))
    assert grown <= 1024 // 64 * state + 3 * operands
    assert grown < 1024 * state / 4


PEAK = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
import re, jax, numpy as np
import rwkv_jax

def kilobytes(what):
    return int(re.search(rf"{what}:\\s+(\\d+)", open("/proc/self/status").read())[1])

rng = np.random.default_rng(0)
op, arguments, results = %r
B, T, H, K = %r
sizes = dict(B=B, T=T, H=H, K=K, V=K)

def arrays(axes):
    shapes = [[sizes[letter] for letter in several] for several in axes.values()]
    return [jax.numpy.asarray(rng.standard_normal(shape, np.float32) / 8) for shape in shapes]

operands, cotangents = arrays(arguments), arrays(results)

@jax.jit
def gradients(operands, cotangents):
    function = getattr(rwkv_jax, op)
    call = lambda *xs: function(*xs, decay="exp", implementation="ffi")
    results, vjp = jax.vjp(call, *operands)
    return *results, *vjp(tuple(cotangents))

gradients = gradients.lower(operands, cotangents).compile()
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmHWM")
results = jax.block_until_ready(gradients(operands, cotangents))
grown = 1024 * (kilobytes("VmHWM") - before)
print(grown / sum(x.nbytes for x in results))
"""


if "ffi" in available("wkv7", Case(1, 16, 1, SIZE), platform="cpu"):

    @pytest.mark.parametrize("op", ["wkv7", pytest.param("wkv6", marks=pytest.mark.slow)])
    def test_peak_memory_of_the_cpu_kernels(op: str) -> None:
        """Little but results. Measured on the process, since what a kernel allocates for itself is
        unknown to XLA, and with a single worker, since each has scratch of its own."""
        axes = dict(internals.axes_of_arguments(op)), dict(internals.axes_of_results(op))
        run = subprocess.run(
            [sys.executable, "-c", PEAK % ((op, *axes), BENCH_SHAPES["1x1024x12x64"])],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=True,
            capture_output=True,
            text=True,
        )
        assert float(run.stdout) <= 2.0
