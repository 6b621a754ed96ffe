"""The CUDA kernels on matrix units, run by a CPU: the code for sm_80, without warpgroup products.

Every block is run warp by warp in an order drawn from a seed. Results that depend on the seed show
a barrier that is missing.
"""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cases
import oracle
import tolerance
from cases import Arrays, Case

TESTS = Path(__file__).parent
FFI = TESTS.parent / "ffi"
CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "cuda_runtime_api.h")
DECAYS = ("log", "exp", "sigmoid")

pytestmark = [
    pytest.mark.skipif(
        not (FFI.is_dir() and shutil.which("g++") and platform.machine() == "x86_64"),
        reason="needs the sources, g++ and an x86-64 CPU",
    ),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("emulation")
    for header in CUDA_HEADERS:
        (folder / header).write_text('#include "emulation.h"\n')
    includes = (folder, TESTS / "emulation", FFI / "cuda", FFI / "include")
    subprocess.run(
        [
            *("g++", "-std=c++20", "-O2", "-mf16c", "-w", "-fPIC", "-shared"),
            *("-DRWKV_JAX_EMULATION", *(f"-I{path}" for path in includes), "-x", "c++"),
            *(TESTS / "emulation" / "kernels.cc", "-o", folder / "kernels.so"),
        ],
        check=True,
    )
    library = ctypes.CDLL(str(folder / "kernels.so"))
    library.ScratchFloats.restype = ctypes.c_int64
    library.ScratchFloats.argtypes = [ctypes.c_int64] * 3
    return library


def _run(
    kernels: Any, seed: int, case: Case, segments: int, inputs: Arrays, cotangents: Arrays
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Results and gradients, and the heads that are left to the other kernels."""

    def poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.full(shape, np.nan).astype(dtype)

    heads = (case.B, case.H)
    state = (*heads, case.K, case.K)
    frames = -(-case.T // 64)
    operands = [inputs[name] for name in (*"rwkvab", "initial_state")]
    results = {
        "y": poisoned(inputs["v"].shape, inputs["v"].dtype),
        "final_state": poisoned(state, np.float32),
    }
    states = poisoned((case.B, frames, case.H, case.K, case.K), cases.DTYPES["bfloat16"])
    floats = case.B * case.H * kernels.ScratchFloats(case.T, case.K, segments)
    memory = poisoned((floats + 4,), np.float32)
    scratch = memory[-memory.ctypes.data % 16 // 4 :]
    left = np.zeros(heads, np.float32)
    given = [cotangents["dy"], cotangents["dfinal_state"]]
    gradients = {f"d{n}": poisoned(inputs[n].shape, inputs[n].dtype) for n in inputs}
    arrays = [*operands, *results.values(), states, scratch, left, *given, *gradients.values()]
    pointers = (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))
    sizes = (ctypes.c_int64 * 4)(case.B, case.T, case.H, case.K)
    decay, half = DECAYS.index(case.decay), case.dtype == "float16"
    error = kernels.Wkv7(seed, sizes, half, decay, ctypes.c_int64(segments), pointers)
    assert error == 0
    return results | gradients, left


@pytest.mark.parametrize(
    ("case", "segments"),
    [
        (Case(1, 16, 1, 64, dtype="bfloat16"), 1),
        (Case(1, 65, 2, 64, dtype="bfloat16", decay="exp"), 1),
        (Case(1, 200, 1, 64, dtype="float16", decay="log"), 3),
        (Case(1, 81, 1, 128, dtype="bfloat16"), 1),
        (Case(1, 130, 1, 128, dtype="float16", decay="exp", regime="near 1"), 2),
        (Case(1, 70, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), 1),
        (Case(1, 200, 2, 64, dtype="bfloat16", decay="exp", regime="mixed"), 3),
        (Case(1, 81, 2, 64, dtype="bfloat16"), 1),
    ],
    ids=str,
)
def test_emulated_kernels(kernels: Any, case: Case, segments: int) -> None:
    inputs, cotangents = cases.wkv7(case)
    results, left = _run(kernels, 1, case, segments, inputs, cotangents)
    expected = oracle.wkv7(inputs, case.decay, cotangents)
    too_far = case.regime == "mixed"
    assert left.all() if too_far else not left.any()
    if not too_far:
        limits = {
            n: tolerance.ceiling(n, case.dtype, sequential=False, highest=False) for n in results
        }
        tolerance.assert_close(results, expected, limits)
        for seed in (2, 3):
            others, _ = _run(kernels, seed, case, segments, inputs, cotangents)
            for name, x in results.items():
                assert x.tobytes() == others[name].tobytes(), name
