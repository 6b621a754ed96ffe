"""What a gradient needs beside its operands and results."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import cases
import rwkv_jax
from cases import BENCH_SHAPES, Case
from operators import available

HEADS, SIZE = 2, 64
STATE = HEADS * SIZE * SIZE * 4


def _compiled(implementation: str, case: Case) -> jax.stages.Compiled:
    inputs, cotangents = cases.wkv7(case)
    shapes = jax.eval_shape(lambda *xs: xs, *inputs.values(), *cotangents.values())

    def gradients(*operands: jax.Array) -> tuple:
        *operands, dy, dstate = operands

        def call(*xs: jax.Array) -> tuple[jax.Array, jax.Array]:
            return rwkv_jax.wkv7(*xs, decay="sigmoid", implementation=implementation)

        results, vjp = jax.vjp(call, *operands)
        return *results, *vjp((dy, dstate))

    return jax.jit(gradients).lower(*shapes).compile()


@pytest.mark.parametrize(
    "implementation", [x for x in available("wkv7", Case(1, 16, 1, SIZE)) if x != "reference"]
)
def test_backward_memory_grows_with_chunks_not_with_tokens(implementation: str) -> None:
    """One saved state in 64 tokens, and a few arrays the size of the operands."""
    short, long = (
        _compiled(implementation, Case(1, tokens, HEADS, SIZE)).memory_analysis()
        for tokens in (1024, 2048)
    )
    grown = long.temp_size_in_bytes - short.temp_size_in_bytes
    operands = long.argument_size_in_bytes - short.argument_size_in_bytes
    assert grown <= 1024 // 64 * STATE + 3 * operands
    assert grown < 1024 * STATE / 8


PEAK = """
import re, jax, numpy as np
from jax import lax
import rwkv_jax

def kilobytes(what):
    return int(re.search(rf"{what}:\\\\s+(\\\\d+)", open("/proc/self/status").read())[1])

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


def test_peak_memory_of_the_cpu_kernels() -> None:
    """Measured on the process, since what a kernel allocates for itself is unknown to XLA."""
    if "ffi" not in available("wkv7", Case(1, 16, 1, SIZE), platform="cpu"):
        return
    run = subprocess.run(
        [sys.executable, "-c", PEAK % (BENCH_SHAPES["1x1024x12x64"],)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert float(run.stdout) <= 2.0
