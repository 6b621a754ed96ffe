"""What a gradient needs beside its operands and results."""

import os
import subprocess
import sys
from typing import Any

import jax
import pytest

import cases
import rwkv_jax
from cases import BENCH_SHAPES, Case
from operators import available

# So many heads that the CUDA kernels do not split a sequence, which costs scratch up to a bound.
HEADS, SIZE = 136, 64
STATE = HEADS * SIZE * SIZE * 4


def _memory(implementation: str, case: Case) -> Any:
    inputs, cotangents = cases.wkv7(case)
    shapes = jax.eval_shape(lambda *xs: xs, *inputs.values(), *cotangents.values())

    def gradients(*given: jax.Array) -> tuple:
        *operands, dy, dstate = given

        def call(*xs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return rwkv_jax.wkv7(*xs, decay="sigmoid", implementation=implementation)

        results, vjp = jax.vjp(call, *operands)
        return *results, *vjp((dy, dstate))

    return jax.jit(gradients).lower(*shapes).compile().memory_analysis()


@pytest.mark.parametrize(
    "implementation", [x for x in available("wkv7", Case(1, 16, 1, SIZE)) if x != "reference"]
)
def test_backward_memory_grows_with_chunks_not_with_tokens(implementation: str) -> None:
    """One saved state in 64 tokens, and a few arrays the size of the operands."""
    short, long = (_memory(implementation, Case(1, tokens, HEADS, SIZE)) for tokens in (1024, 2048))
    grown = long.temp_size_in_bytes - short.temp_size_in_bytes
    operands = long.argument_size_in_bytes - short.argument_size_in_bytes
    assert grown <= 1024 // 64 * STATE + 3 * operands
    assert grown < 1024 * STATE / 4


PEAK = """
import re, jax, numpy as np
import rwkv_jax

def kilobytes(what):
    return int(re.search(rf"{what}:\\s+(\\d+)", open("/proc/self/status").read())[1])

rng = np.random.default_rng(0)
B, T, H, K = %r
operands = [jax.numpy.asarray(rng.standard_normal((B, T, H, K), np.float32) / 8) for _ in range(7)]
state = jax.numpy.zeros((B, H, K, K))

@jax.jit
def gradients(r, w, k, v, a, b, dy, state, dstate):
    call = lambda *xs: rwkv_jax.wkv7(*xs, decay="sigmoid", implementation="ffi")
    results, vjp = jax.vjp(call, r, w, k, v, a, b, state)
    return *results, *vjp((dy, dstate))

gradients = gradients.lower(*operands, state, state).compile()
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmHWM")
results = jax.block_until_ready(gradients(*operands, state, state))
grown = 1024 * (kilobytes("VmHWM") - before)
inputs = sum(x.nbytes for x in operands) + state.nbytes
outputs = sum(x.nbytes for x in results)
print((inputs + grown) / (inputs + outputs))
"""


if "ffi" in available("wkv7", Case(1, 16, 1, SIZE), platform="cpu"):

    def test_peak_memory_of_the_cpu_kernels() -> None:
        """Measured on the process, since what a kernel allocates for itself is unknown to XLA."""
        run = subprocess.run(
            [sys.executable, "-c", PEAK % (BENCH_SHAPES["1x1024x12x64"],)],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            check=True,
            capture_output=True,
            text=True,
        )
        assert float(run.stdout) <= 2.0
