"""CUDA kernels run by a CPU: those on matrix units, as the code for sm_80, without warpgroup
products, and the float kernels of all operators.

Every block is run warp by warp in an order drawn from a seed. Results that depend on the seed show
a barrier that is missing.

On a machine with a GPU the same tests run the kernels there, without JAX next to them, and so under
compute-sanitizer (memcheck or racecheck):

    compute-sanitizer --tool memcheck python -m pytest --kernels-on-gpu sm_90a \\
        tests/test_emulation.py
"""

import concurrent.futures
import ctypes
import fcntl
import functools
import os
import platform
import shutil
import subprocess
import weakref
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import _packing, _sequences
from support import cases, harness, oracle, tolerance
from support.cases import Arrays, Case
from support.operators import SEQUENCES

TESTS = Path(__file__).parent
FFI = TESTS.parent / "ffi"
CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "cuda_runtime_api.h")
DECAYS = ("log", "exp", "sigmoid")
SOURCES = (
    *("kernels.cc", "wkv7_recurrent.cc"),
    *("wkv6.cc", "wkv6_gradient.cc", "wkv6_scan.cc", "wkv4.cc"),
)

pytestmark = [
    pytest.mark.skipif(
        not (FFI.is_dir() and shutil.which("g++") and platform.machine() == "x86_64"),
        reason="needs the sources, g++ and an x86-64 CPU",
    ),
    pytest.mark.slow,
]


def _emulated(folder: Path) -> list[Any]:
    """The compiler, with CUDA's headers replaced."""
    for header in CUDA_HEADERS:
        (folder / header).write_text('#include "emulation.h"\n')
    includes = f"-I{folder}", f"-I{TESTS / 'emulation' / 'cpu'}"
    language = "-x", "c++", "-std=c++20", "-O2", "-mf16c", "-w", "-fPIC"
    return ["g++", *language, "-DRWKV_JAX_EMULATION", *includes]


def _on_gpu(arch: str) -> list[Any]:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    includes = [f"-I{TESTS / 'emulation' / 'gpu'}"]
    options = "-std=c++17", f"-arch={arch}", "-lineinfo", "-w", "-Xcompiler", "-fPIC"
    return [nvcc, "-x", "cu", *options, *includes]


def _build(folder: Path, arch: str | None) -> None:
    compiler = _on_gpu(arch) if arch else _emulated(folder)
    includes = (f"-I{FFI / path}" for path in ("cuda", "include"))
    compile_one = [*compiler, "-DRWKV_JAX_SMALL_TESTS", *includes, "-c"]
    objects = [folder / f"{source}.o" for source in SOURCES]

    def run(source: str, to: Path) -> None:
        subprocess.run([*compile_one, TESTS / "emulation" / source, "-o", to], check=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, SOURCES, objects))
    link = [compiler[0], "-shared", *(["-cudart", "shared"] if arch else []), *objects]
    subprocess.run([*link, "-o", folder / "kernels.so"], check=True)


@pytest.fixture(scope="session")
def kernels(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    """Built by the first of the workers that need it."""
    arch = request.config.getoption("--kernels-on-gpu")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulation"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "kernels.so").exists():
            _build(folder, arch)
    if arch:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    library = ctypes.CDLL(str(folder / "kernels.so"))
    if arch:
        global _memory
        _memory = functools.partial(_managed, library)
    library.ScratchFloats.restype = ctypes.c_int64
    library.ScratchFloats.argtypes = [ctypes.c_int64] * 3
    library.Wkv6ScratchFloats.restype = ctypes.c_int64
    library.Wkv6ScratchFloats.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_int]
    library.Wkv7TokensScratchFloats.restype = ctypes.c_int64
    library.Wkv7TokensScratchFloats.argtypes = [ctypes.c_int64]
    return library


def _managed(library: ctypes.CDLL, size: int) -> np.ndarray:
    """Bytes that a GPU and this process have, exactly so many."""
    address = ctypes.c_void_p()
    assert library.cudaMallocManaged(ctypes.byref(address), ctypes.c_size_t(max(size, 1)), 1) == 0
    assert address.value
    memory = (ctypes.c_uint8 * size).from_address(address.value)
    weakref.finalize(memory, library.cudaFree, address)
    return np.ctypeslib.as_array(memory)


def _memory(size: int) -> np.ndarray:
    """Bytes, aligned as those of a device are."""
    memory = np.empty(size + 16, np.uint8)
    start = -memory.ctypes.data % 16
    return memory[start : start + size]


def _poisoned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of NaN."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    array = _memory(size).view(dtype).reshape(shape)
    array[...] = np.nan
    return array


def _aligned(x: np.ndarray) -> np.ndarray:
    array = _poisoned(x.shape, x.dtype)
    array[...] = x
    return array


def _pointers(arrays: list[np.ndarray]) -> Any:
    return (ctypes.c_void_p * len(arrays))(*(x.ctypes.data for x in arrays))


class Rows:
    """How the rows of a call are shared, if they are: `ids` says which tokens are a segment, or
    `cu` which ones are a sequence of a single row."""

    def __init__(
        self,
        case: Case,
        ids: np.ndarray | None = None,
        cu: np.ndarray | None = None,
        *,
        in_turn: bool = False,
    ):
        self.cu = cu
        self.sequences, self.frames = case.B, -(-case.T // 64)
        given: list[Any] = [None, None, None]
        words = 0
        if ids is not None:
            given[0] = _packing.operand(_packing.marks(jnp.asarray(ids)))[0]
        if cu is not None:
            row = jnp.zeros((1, case.T, 1))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_sequences, "LONG", 1 if in_turn else case.T + 1)
                of_row = _sequences.native([row], [], jnp.asarray(cu, jnp.int32)[None])
            given[1:] = of_row.spans, of_row.owners
            self.sequences, self.frames = len(cu) - 1, of_row.owners.shape[1]
            words = of_row.spans.shape[1]
        bits = (None if x is None else np.asarray(x).view(np.float32) for x in given)
        self._kept = [None if x is None else _aligned(x) for x in bits]
        addresses = [0 if x is None else x.ctypes.data for x in self._kept]
        self.address = ctypes.byref((ctypes.c_int64 * 5)(*addresses, words, self.frames))


def _run(
    kernels: Any,
    seed: int,
    case: Case,
    segments: int,
    inputs: Arrays,
    cotangents: Arrays,
    rows: Rows,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Results and gradients, and the heads that are left to the other kernels."""
    state = inputs["initial_state"].shape
    heads = state[:2]
    operands = [_aligned(inputs[name]) for name in (*"rwkvab", "initial_state")]
    results = {
        "y": _poisoned(inputs["v"].shape, inputs["v"].dtype),
        "final_state": _poisoned(state, np.float32),
    }
    saved = (len(inputs["v"]), rows.frames, *state[1:])
    states = _poisoned(saved, cases.DTYPES["bfloat16"])
    floats = case.B * case.H * kernels.ScratchFloats(case.T, case.K, segments)
    if rows.cu is not None:
        floats = case.H * (rows.frames + 4 * segments) * case.K**2 // 2
    scratch = _poisoned((floats,), np.float32)
    left = _aligned(np.zeros(heads, np.float32))
    given = [_aligned(cotangents[name]) for name in ("dy", "dfinal_state")]
    gradients = {f"d{n}": _poisoned(inputs[n].shape, inputs[n].dtype) for n in inputs}
    arrays = [*operands, *results.values(), states, scratch, left, *given, *gradients.values()]
    sizes = (ctypes.c_int64 * 4)(rows.sequences, case.T, case.H, case.K)
    decay, half = DECAYS.index(case.decay), case.dtype == "float16"
    error = kernels.Wkv7(
        *(seed, sizes, half, decay, ctypes.c_int64(segments), rows.address), _pointers(arrays)
    )
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
    results, left = _run(kernels, 1, case, segments, inputs, cotangents, Rows(case))
    expected = oracle.wkv7(inputs, case.decay, cotangents)
    too_far = case.regime == "mixed"
    assert left.all() if too_far else not left.any()
    if not too_far:
        limits = {
            n: tolerance.ceiling(n, case.dtype, sequential=False, highest=False) for n in results
        }
        tolerance.assert_close(results, expected, limits)
        others, _ = _run(kernels, 2, case, segments, inputs, cotangents, Rows(case))
        for name, x in results.items():
            assert x.tobytes() == others[name].tobytes(), name


IDS = np.array(
    [
        [1] * 5 + [2] * 60 + [1] * 40 + [3] * 25,
        [0] * 3 + [4] * 20 + [0] * 10 + [4] * 31 + [9] * 16 + [5, 6, 7] * 12 + [0] * 14,
    ]
)
"""The segments of rows of 130 tokens."""


def _spoil_padding(inputs: Arrays, cotangents: Arrays, ids: np.ndarray) -> None:
    for x in (*inputs.values(), cotangents["dy"]):
        if x.shape[:2] == ids.shape:
            x[ids == 0] = np.nan


@pytest.mark.parametrize(
    ("case", "segments"),
    [
        (Case(2, 130, 1, 64, dtype="bfloat16"), 1),
        (Case(2, 130, 1, 64, dtype="float16", decay="log"), 3),
        (Case(1, 81, 1, 128, dtype="bfloat16"), 2),
    ],
    ids=str,
)
def test_emulated_rows_of_several_sequences(kernels: Any, case: Case, segments: int) -> None:
    inputs, cotangents = cases.wkv7(case)
    ids = IDS[: case.B, : case.T]
    expected = harness.expected("wkv7", inputs, cotangents, decay=case.decay, segment_ids=ids)
    _spoil_padding(inputs, cotangents, ids)
    results, left = _run(kernels, 1, case, segments, inputs, cotangents, Rows(case, ids))
    assert not left.any()
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=False, highest=False) for n in results}
    tolerance.assert_close(results, expected, limits)
    others, _ = _run(kernels, 2, case, segments, inputs, cotangents, Rows(case, ids))
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name


@pytest.mark.parametrize(
    "case",
    [Case(1, 81, 2, 64, dtype="bfloat16"), Case(2, 16, 1, 128, dtype="float16")],
    ids=str,
)
def test_emulated_summaries(kernels: Any, case: Case) -> None:
    inputs, cotangents = cases.wkv7(case)
    given = [*(inputs[n] for n in "wkvabr"), *cotangents.values()]
    arrays = [_aligned(x) for x in given]
    state = (case.B, case.H, case.K, case.K)
    results = {n: _poisoned(state, np.float32) for n in ("factor", "added", "dinitial_state")}
    sizes = (ctypes.c_int64 * 4)(case.B, case.T, case.H, case.K)
    pointers = _pointers([*arrays, *results.values()])
    assert kernels.Wkv7Summaries(1, sizes, case.dtype == "float16", None, pointers) == 0

    identity = np.broadcast_to(np.eye(case.K, dtype=np.float32), state)
    runs = {
        "added": {"initial_state": np.zeros(state, np.float32)},
        "factor": {"initial_state": identity, "v": np.zeros_like(inputs["v"])},
    }
    expected = {
        name: oracle.wkv7(inputs | run, case.decay, cotangents)["final_state"]
        for name, run in runs.items()
    }
    gradients = oracle.wkv7(inputs, case.decay, cotangents)
    expected["dinitial_state"] = gradients["dinitial_state"]
    limits = {
        n: tolerance.ceiling(of, case.dtype, sequential=False, highest=False)
        for n, of in zip(results, ("final_state", "final_state", "dinitial_state"), strict=True)
    }
    tolerance.assert_close(results, expected, limits)


def _run_wkv6(
    kernels: Any,
    seed: int,
    case: Case,
    segments: int,
    matrix_units: bool,
    inputs: Arrays,
    cotangents: Arrays,
    rows: Rows,
) -> dict[str, np.ndarray]:
    constant = inputs["w"].ndim == 2
    state = inputs["initial_state"].shape
    floats = case.dtype == "float32"
    saved = (len(inputs["v"]), rows.frames, *state[1:])
    summed = (*saved[:2], *state[1:3]) if matrix_units else (state[0], segments, *state[1:3])
    scratch = state[0] * kernels.Wkv6ScratchFloats(case.T, case.K, segments, matrix_units)
    if rows.cu is not None and matrix_units:
        scratch = (rows.frames // 2 + 2 * segments) * case.K**2
    results = {
        "y": _poisoned(inputs["v"].shape, inputs["v"].dtype),
        "final_state": _poisoned(state, np.float32),
    }
    gradients = {f"d{n}": _poisoned(inputs[n].shape, inputs[n].dtype) for n in "rwkv"}
    gradients["du"] = _poisoned(summed, np.float32)
    if constant:
        gradients["dw"] = _poisoned(summed, np.float32)
    gradients["dinitial_state"] = _poisoned(state, np.float32)

    parameter = np.zeros(state[:3], np.float32)
    w = inputs["w"] + parameter if constant else inputs["w"]
    arrays = [
        *map(_aligned, (inputs["r"], w, inputs["k"], inputs["v"], inputs["u"] + parameter)),
        _aligned(inputs["initial_state"]),
        *results.values(),
        _poisoned(saved, np.float32 if floats else cases.DTYPES["bfloat16"]),
        *map(_aligned, (cotangents["dy"], cotangents["dfinal_state"])),
        *gradients.values(),
        _poisoned((case.H, scratch), np.float32),
    ]
    sizes = (ctypes.c_int64 * 4)(rows.sequences, case.T, case.H, case.K)
    dtype, decay = list(cases.DTYPES).index(case.dtype), DECAYS.index(case.decay)
    error = kernels.Wkv6(
        *(seed, sizes, dtype, decay, constant, ctypes.c_int64(segments), matrix_units),
        *(rows.address, _pointers(arrays)),
    )
    assert error == 0
    for name in ("du", "dw") if constant else ("du",):
        gradients[name] = gradients[name].sum((0, 1))
    return results | gradients


@pytest.mark.parametrize(
    ("case", "constant", "segments"),
    [
        (Case(1, 0, 2, 16, decay="log"), True, 3),
        (Case(2, 1, 1, 32, decay="log"), False, 1),
        (Case(2, 70, 2, 16, decay="exp", regime="mixed"), False, 1),
        (Case(1, 133, 1, 32, dtype="float16", decay="log"), True, 4),
        (Case(1, 70, 2, 64, decay="exp"), False, 1),
        (Case(1, 130, 1, 64, decay="log", regime="mixed"), False, 3),
        (Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), True, 3),
        (Case(1, 69, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), True, 1),
        (Case(1, 130, 1, 128, decay="log"), False, 2),
    ],
    ids=str,
)
def test_emulated_recurrence(kernels: Any, case: Case, constant: bool, segments: int) -> None:
    _check_wkv6(kernels, case, constant, segments, matrix_units=False)


@pytest.mark.parametrize(
    ("case", "constant", "segments"),
    [
        (Case(1, 16, 2, 64, dtype="bfloat16", decay="exp"), False, 1),
        (Case(2, 81, 1, 64, dtype="float16", decay="log"), False, 1),
        (Case(1, 200, 1, 64, dtype="bfloat16", decay="exp"), True, 3),
        (Case(1, 130, 1, 64, dtype="bfloat16", decay="exp", regime="mixed"), False, 5),
        (Case(1, 40, 1, 64, dtype="float16", decay="log", regime="mixed"), True, 1),
        (Case(1, 70, 1, 64, dtype="bfloat16", decay="log", regime="near 0"), False, 1),
        (Case(1, 70, 1, 64, dtype="bfloat16", decay="exp", regime="near 1"), False, 2),
    ],
    ids=str,
)
def test_emulated_matrix_units(kernels: Any, case: Case, constant: bool, segments: int) -> None:
    _check_wkv6(kernels, case, constant, segments, matrix_units=True)


@pytest.mark.parametrize(
    ("case", "constant", "segments"),
    [
        (Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), False, 1),
        (Case(2, 130, 1, 64, dtype="float16", decay="log"), False, 3),
        (Case(2, 130, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), False, 2),
        (Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), True, 2),
    ],
    ids=str,
)
def test_emulated_matrix_units_on_several_sequences(
    kernels: Any, case: Case, constant: bool, segments: int
) -> None:
    _check_wkv6(kernels, case, constant, segments, matrix_units=True, ids=IDS)


def _check_wkv6(
    kernels: Any,
    case: Case,
    constant: bool,
    segments: int,
    *,
    matrix_units: bool,
    ids: np.ndarray | None = None,
) -> None:
    inputs, cotangents = cases.wkv6(case, constant=constant)
    expected = (oracle.wkv5 if constant else oracle.wkv6)(inputs, case.decay, cotangents)
    if ids is not None:
        op = "wkv5" if constant else "wkv6"
        expected = harness.expected(op, inputs, cotangents, decay=case.decay, segment_ids=ids)
        _spoil_padding(inputs, cotangents, ids)
    rows = Rows(case, ids)
    results, others = (
        _run_wkv6(kernels, seed, case, segments, matrix_units, inputs, cotangents, rows)
        for seed in (1, 2)
    )
    exact = not matrix_units
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=exact, highest=exact) for n in results}
    tolerance.assert_close(results, expected, limits)
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name


def _run_wkv4(
    kernels: Any,
    seed: int,
    case: Case,
    segments: int,
    inputs: Arrays,
    cotangents: Arrays,
    rows: Rows,
) -> dict[str, np.ndarray]:
    tokens, part = inputs["k"].shape, inputs["initial_num"].shape
    parts = ("num", "den", "log_max")
    saved = (len(inputs["k"]), rows.frames, part[1])
    summed = (part[0], segments, part[1])
    results = {"y": _poisoned(tokens, inputs["v"].dtype)}
    results |= {f"final_{name}": _poisoned(part, np.float32) for name in parts}
    gradients = {f"d{name}": _poisoned(summed, np.float32) for name in "wu"}
    gradients |= {f"d{name}": _poisoned(tokens, inputs[name].dtype) for name in "kv"}
    gradients |= {f"dinitial_{name}": _poisoned(part, np.float32) for name in parts}
    parameter = np.zeros(part, np.float32)
    arrays = [
        *(_aligned(inputs[name] + parameter) for name in "wu"),
        *(_aligned(inputs[name]) for name in ("k", "v", *(f"initial_{name}" for name in parts))),
        *results.values(),
        *(_poisoned(saved, np.float32) for _ in parts),
        *(_aligned(x) for x in cotangents.values()),
        *gradients.values(),
        *(_poisoned((part[0], segments - 1, x, part[1]), np.float32) for x in (3, 4)),
    ]
    sizes = (ctypes.c_int64 * 3)(rows.sequences, case.T, part[1])
    dtype, decay = list(cases.DTYPES).index(case.dtype), DECAYS.index(case.decay)
    error = kernels.Wkv4(
        *(seed, sizes, dtype, decay, ctypes.c_int64(segments), rows.address), _pointers(arrays)
    )
    assert error == 0
    for name in ("dw", "du"):
        gradients[name] = gradients[name].sum((0, 1))
    return results | gradients


@pytest.mark.parametrize(
    ("case", "segments"),
    [
        (Case(1, 0, 1, 32, decay="log"), 1),
        (Case(2, 1, 1, 16, decay="log"), 3),
        (Case(2, 69, 1, 64, decay="exp"), 1),
        (Case(3, 61, 1, 66, dtype="bfloat16", decay="log", regime="mixed"), 1),
        (Case(1, 300, 1, 33, decay="log"), 3),
        (Case(2, 130, 1, 35, dtype="bfloat16", decay="exp"), 3),
        (Case(1, 200, 1, 66, dtype="float16", decay="log"), 2),
        (Case(1, 128, 1, 64, dtype="bfloat16", decay="log", regime="near 1"), 1),
        (Case(1, 133, 1, 40, decay="log", regime="near 0"), 1),
        (Case(1, 133, 1, 40, decay="log", regime="near 1"), 3),
        (Case(2, 133, 1, 40, decay="log", regime="extreme"), 3),
        (Case(2, 133, 1, 40, decay="exp", regime="mixed"), 2),
        (Case(1, 133, 1, 64, dtype="bfloat16", decay="exp", regime="extreme"), 1),
        (Case(1, 133, 1, 64, dtype="float16", decay="log", regime="mixed"), 3),
    ],
    ids=str,
)
def test_emulated_wkv4(kernels: Any, case: Case, segments: int) -> None:
    inputs, cotangents = cases.wkv4(case)
    results = _run_wkv4(kernels, 1, case, segments, inputs, cotangents, Rows(case))
    expected = oracle.wkv4(inputs, case.decay, cotangents)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=True, highest=True) for n in results}
    tolerance.assert_close(results, expected, limits)
    others = _run_wkv4(kernels, 2, case, segments, inputs, cotangents, Rows(case))
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name


@pytest.mark.parametrize(
    "case",
    [
        Case(3, 1, 1, 100, dtype="bfloat16", decay="exp"),
        Case(2, 1, 1, 33, decay="log", regime="mixed"),
    ],
    ids=str,
)
def test_emulated_wkv4_step(kernels: Any, case: Case) -> None:
    """The state is updated in place."""
    inputs, _ = cases.step(cases.wkv4, "kv", case)
    y = _poisoned(inputs["v"].shape, inputs["v"].dtype)
    state = {name: _aligned(inputs[name]) for name in ("num", "den", "log_max")}
    parameter = np.zeros(y.shape, np.float32)
    arrays = [
        *(_aligned(inputs[name] + parameter) for name in "wu"),
        *(_aligned(inputs[name]) for name in "kv"),
        *(y, *state.values()),
    ]
    sizes = (ctypes.c_int64 * 3)(case.B, 1, y.shape[1])
    dtype, decay = list(cases.DTYPES).index(case.dtype), DECAYS.index(case.decay)
    assert kernels.Wkv4InPlace(sizes, dtype, decay, _pointers(arrays)) == 0
    expected = oracle.step(oracle.wkv4, "kv", inputs, case.decay)
    limit = tolerance.ceiling("y", case.dtype, sequential=True, highest=True)
    tolerance.assert_close({"y": y, **state}, expected, limit)


def _run_wkv7_tokens(
    kernels: Any,
    seed: int,
    case: Case,
    segments: int,
    inputs: Arrays,
    cotangents: Arrays,
    rows: Rows,
) -> dict[str, np.ndarray]:
    state = inputs["initial_state"].shape
    saved = (len(inputs["v"]), rows.frames, *state[1:])
    at_a_time = -(-state[0] * case.H // 2)
    scratch = segments * kernels.Wkv7TokensScratchFloats(case.K)
    floats = case.dtype == "float32"
    results = {
        "y": _poisoned(inputs["v"].shape, inputs["v"].dtype),
        "final_state": _poisoned(state, np.float32),
    }
    gradients = {f"d{n}": _poisoned(inputs[n].shape, inputs[n].dtype) for n in inputs}
    arrays = [
        *(_aligned(inputs[name]) for name in (*"rwkvab", "initial_state")),
        *results.values(),
        _poisoned(saved, np.float32 if floats else cases.DTYPES["bfloat16"]),
        _poisoned((at_a_time, scratch), np.float32),
        *(_aligned(cotangents[name]) for name in ("dy", "dfinal_state")),
        *gradients.values(),
    ]
    sizes = (ctypes.c_int64 * 4)(rows.sequences, case.T, case.H, case.K)
    dtype, decay = list(cases.DTYPES).index(case.dtype), DECAYS.index(case.decay)
    counts = ctypes.c_int64(segments), ctypes.c_int64(at_a_time)
    error = kernels.Wkv7Tokens(
        *(seed, sizes, dtype, decay, *counts, rows.address), _pointers(arrays)
    )
    assert error == 0
    return results | gradients


def _run_kernels(
    op: str,
    kernels: Any,
    matrix_units: bool,
    seed: int,
    case: Case,
    segments: int,
    inputs: Arrays,
    cotangents: Arrays,
    rows: Rows,
) -> dict[str, np.ndarray]:
    """By those on matrix units, or by those that compute in float."""
    call = kernels, seed, case, segments
    given = inputs, cotangents, rows
    if op == "wkv4":
        return _run_wkv4(*call, *given)
    if op != "wkv7":
        return _run_wkv6(*call, matrix_units, *given)
    return _run(*call, *given)[0] if matrix_units else _run_wkv7_tokens(*call, *given)


@pytest.mark.parametrize(
    ("case", "segments"),
    [
        (Case(2, 1, 1, 32, decay="log"), 1),
        (Case(1, 70, 2, 16, decay="exp", regime="mixed"), 1),
        (Case(1, 133, 1, 32, dtype="float16", decay="log"), 2),
        (Case(1, 130, 1, 64, dtype="bfloat16"), 3),
        (Case(1, 69, 1, 128), 1),
    ],
    ids=str,
)
def test_emulated_wkv7_tokens(kernels: Any, case: Case, segments: int) -> None:
    inputs, cotangents = cases.wkv7(case)
    results, others = (
        _run_wkv7_tokens(kernels, seed, case, segments, inputs, cotangents, Rows(case))
        for seed in (1, 2)
    )
    expected = oracle.wkv7(inputs, case.decay, cotangents)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=True, highest=True) for n in results}
    tolerance.assert_close(results, expected, limits)
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name


PACKED = [
    ("wkv7", Case(4, 70, 1, 16, decay="exp"), 1),
    ("wkv7", Case(4, 133, 1, 32, dtype="float16", decay="log", regime="mixed"), 3),
    ("wkv7", Case(2, 135, 1, 64, dtype="bfloat16"), 2),
    ("wkv7", Case(2, 37, 1, 128), 2),
    ("wkv6", Case(4, 70, 1, 16, decay="exp", regime="mixed"), 1),
    ("wkv6", Case(3, 133, 2, 32, dtype="float16", decay="log"), 3),
    ("wkv6", Case(2, 135, 1, 64, dtype="bfloat16", decay="exp"), 2),
    ("wkv6", Case(2, 37, 1, 128, decay="log"), 2),
    ("wkv5", Case(2, 133, 1, 64, decay="log"), 2),
    ("wkv4", Case(4, 70, 1, 33, decay="log"), 1),
    ("wkv4", Case(5, 200, 1, 64, decay="exp"), 3),
    ("wkv4", Case(5, 200, 1, 32, decay="log", regime="mixed"), 4),
    ("wkv4", Case(4, 320, 1, 66, dtype="bfloat16", decay="log"), 3),
    ("wkv4", Case(4, 133, 1, 35, dtype="float16", decay="exp"), 2),
    ("wkv4", Case(4, 200, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), 2),
    ("wkv4", Case(2, 4170, 1, 4, decay="log"), 1),
]


def _ids(case: Case, seed: int = 0) -> np.ndarray:
    """Rows of short segments, of long ones, and of padding here and there, at the start and at the
    end; the last row has nothing else."""
    random = np.random.default_rng(seed)
    rows = np.zeros((case.B, case.T), np.int32)
    for row, longest in zip(rows[:-1], (9, 64, 150, 90), strict=False):
        start = 0
        while start < case.T:
            length = random.integers(1, longest)
            row[start : start + length] = random.integers(0, 1 << 10) * (random.random() < 0.8)
            start += length
    return rows


@pytest.mark.parametrize(("op", "case", "segments"), PACKED, ids=str)
def test_emulated_packing(kernels: Any, op: str, case: Case, segments: int) -> None:
    """What is not finite in padding, or in another segment, reaches nothing."""
    own, ids = SEQUENCES[op], _ids(case)
    inputs, cotangents = own.make(case)
    timed = [name for name in own.inputs if name not in own.shared]
    for x in (*(inputs[name] for name in timed), cotangents["dy"]):
        x[ids == 0] = np.nan
    run = functools.partial(_run_kernels, op, kernels, False)
    results = run(1, case, segments, inputs, cotangents, Rows(case, ids))
    expected = harness.expected(op, inputs, cotangents, decay=case.decay, segment_ids=ids)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=True, highest=True) for n in results}
    tolerance.assert_close(results, expected, limits)
    for name in ("y", *(f"d{n}" for n in timed)):
        assert not results[name][ids == 0].any(), name
    others = run(2, case, segments, inputs, cotangents, Rows(case, ids))
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name

    poisoned = np.zeros(ids.shape, bool)
    for row, parts in enumerate(map(harness.segments_of, ids)):
        if len(parts) > 2:
            poisoned[row, parts[len(parts) // 2]] = True
    for i, name in enumerate((*timed, "dy")):
        x = cotangents["dy"] if name == "dy" else inputs[name]
        x[poisoned] = (np.inf, np.nan)[i % 2]
    others = run(1, case, segments, inputs, cotangents, Rows(case, ids))
    for name in (f"d{n}" for n in own.shared):
        del results[name]
    for name, x in results.items():
        x, other = (a[~poisoned] if a.shape[1] == case.T else a for a in (x, others[name]))
        assert x.tobytes() == other.tobytes(), name


def test_emulated_wkv4_jumps(kernels: Any) -> None:
    """Keys of which weights next to each other, in one segment or in two, are out of the range of
    float32."""
    case = Case(5, 200, 1, 16, decay="log", regime="near 1")
    inputs, cotangents = cases.wkv4(case)
    ids, random = _ids(case), np.random.default_rng(0)
    jumps = random.choice([0, 0, -90, 90], (case.B, case.T // 5, case.K))
    inputs["k"] += np.repeat(np.float32(jumps), 5, axis=1)
    results = _run_wkv4(kernels, 1, case, 3, inputs, cotangents, Rows(case, ids))
    expected = harness.expected("wkv4", inputs, cotangents, decay=case.decay, segment_ids=ids)
    tolerance.assert_close(results, expected, 1e-4)


@pytest.mark.parametrize("marked", [False, True])
def test_emulated_wkv4_without_weight(kernels: Any, marked: bool) -> None:
    """Keys of -inf, of a whole run of tokens too."""
    case = Case(1, 100, 1, 16, decay="log")
    inputs, cotangents = cases.wkv4(case)
    inputs["k"][:, 13:45] = -np.inf
    ids = np.ones((1, case.T), np.int32)
    ids[:, 90:] = 2
    rows = Rows(case, ids if marked else None)
    results = _run_wkv4(kernels, 1, case, 1, inputs, cotangents, rows)
    inputs["k"][:, 13:45] = -1e4
    expected = oracle.wkv4(inputs, case.decay, cotangents)
    if marked:
        expected = harness.expected("wkv4", inputs, cotangents, decay=case.decay, segment_ids=ids)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=True, highest=True) for n in results}
    tolerance.assert_close(results, expected, limits)


BY_TOKEN, ON_MATRICES = False, True
"""The kernels."""


@pytest.mark.parametrize(
    ("op", "case", "segments", "matrix_units"),
    [
        ("wkv7", Case(1, 300, 1, 16, decay="exp", regime="mixed"), 1, BY_TOKEN),
        ("wkv7", Case(1, 300, 2, 32, dtype="float16", decay="log"), 3, BY_TOKEN),
        ("wkv6", Case(1, 300, 2, 16, decay="exp", regime="mixed"), 1, BY_TOKEN),
        ("wkv6", Case(1, 300, 1, 32, dtype="bfloat16", decay="log"), 3, BY_TOKEN),
        ("wkv5", Case(1, 300, 1, 32, decay="log"), 2, BY_TOKEN),
        ("wkv4", Case(1, 300, 1, 33, decay="log"), 1, BY_TOKEN),
        ("wkv4", Case(1, 300, 1, 40, decay="log", regime="mixed"), 4, BY_TOKEN),
        ("wkv4", Case(1, 300, 1, 66, dtype="bfloat16", decay="exp"), 3, BY_TOKEN),
        ("wkv7", Case(1, 300, 1, 64, dtype="bfloat16"), 1, ON_MATRICES),
        ("wkv7", Case(1, 300, 1, 64, dtype="float16"), 3, ON_MATRICES),
        ("wkv7", Case(1, 300, 1, 128, dtype="bfloat16"), 2, ON_MATRICES),
        (
            "wkv6",
            Case(1, 300, 1, 64, dtype="bfloat16", decay="log", regime="mixed"),
            1,
            ON_MATRICES,
        ),
        ("wkv6", Case(1, 300, 1, 64, dtype="float16", decay="exp"), 3, ON_MATRICES),
        ("wkv5", Case(1, 300, 1, 64, dtype="bfloat16", decay="log"), 2, ON_MATRICES),
    ],
    ids=str,
)
def test_emulated_sequences(
    kernels: Any, op: str, case: Case, segments: int, matrix_units: bool
) -> None:
    """Of different lengths in a row, of which they have not the first and the last tokens."""
    cu = np.minimum(cases.CU_SEQLENS + 3, case.T - 2)
    _check_sequences(kernels, op, case, segments, matrix_units, cu)


def _check_sequences(
    kernels: Any, op: str, case: Case, segments: int, matrix_units: bool, cu: np.ndarray
) -> None:
    """Tokens of no sequence are not written, and which sequence runs first makes no difference."""
    own, clamped = SEQUENCES[op], np.maximum.accumulate(np.clip(cu, 0, case.T))
    inputs, cotangents = harness.operands(op, case, cu_seqlens=cu)
    expected = harness.expected(op, inputs, cotangents, decay=case.decay, cu_seqlens=cu)
    run = functools.partial(_run_kernels, op, kernels, matrix_units)
    results, others = (
        run(seed, case, segments, inputs, cotangents, Rows(case, cu=cu, in_turn=in_turn))
        for seed, in_turn in ((1, False), (2, True))
    )
    timed = {"y", *(f"d{n}" for n in own.inputs if n not in own.shared)}
    first, last = clamped[0], clamped[-1]
    for name, x in results.items():
        assert x.tobytes() == others[name].tobytes(), name
        if name in timed:
            outside = np.concatenate([x[:, :first], x[:, last:]], axis=1)
            assert np.isnan(np.float32(outside)).all(), name
            x[:, :first], x[:, last:] = 0, 0
    exact = not matrix_units
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=exact, highest=exact) for n in results}
    tolerance.assert_close(results, expected, limits)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("op", "case", "matrix_units"),
    [
        ("wkv7", Case(1, 200, 1, 16, decay="exp"), BY_TOKEN),
        ("wkv6", Case(1, 200, 1, 16, decay="log"), BY_TOKEN),
        ("wkv4", Case(1, 200, 1, 16, decay="log"), BY_TOKEN),
        ("wkv7", Case(1, 200, 1, 64, dtype="bfloat16"), ON_MATRICES),
        ("wkv6", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp"), ON_MATRICES),
    ],
    ids=str,
)
def test_emulated_sequences_that_are_wrong(
    kernels: Any, op: str, case: Case, matrix_units: bool, seed: int
) -> None:
    """Numbers of any size in any order are those that they are clamped to."""
    random = np.random.default_rng(seed)
    sizes = random.choice([10, 300, 1 << 31], 6)
    cu = np.array([random.integers(-size, size) for size in sizes], np.int32)
    _check_sequences(kernels, op, case, 1 + 2 * seed, matrix_units, cu)
