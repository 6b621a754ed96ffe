"""The CUDA handlers and kernels as a Python module: run by a CPU, on emulated devices, or by a GPU.

`tests/emulation` has what takes the place of CUDA. The fixtures are there for all tests.
"""

import concurrent.futures
import fcntl
import functools
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import internals, layer_functions
from support.cases import GPUS

EMULATION = Path(__file__).parents[1] / "emulation"
FFI = EMULATION.parents[1] / "ffi"
CUDA_HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "cuda_runtime_api.h")
NAME = "rwkv_jax_emulation"

GAP = 64
"""The numbers between the parts of a scratch."""

INITCHECK = "RWKV_JAX_EMULATION_INITCHECK" in os.environ
"""Whether a GPU's memory is left as it is allocated. Gaps then hold anything."""


missing = not (FFI.is_dir() and shutil.which("g++") and platform.machine() == "x86_64")
needs_emulation = pytest.mark.skipif(missing, reason="needs the sources, g++ and an x86-64 CPU")


def _emulated(folder: Path) -> list[str]:
    """The compiler, with CUDA's headers replaced."""
    for header in CUDA_HEADERS:
        (folder / header).write_text('#include "emulation.h"\n')
    language = "-x", "c++", "-std=c++20", "-O1", "-mf16c", "-w", "-fPIC"
    return ["g++", *language, "-DRWKV_JAX_EMULATION", f"-I{folder}", f"-I{EMULATION / 'cpu'}"]


def _on_gpu(arch: str) -> list[str]:
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    options = "-std=c++17", f"-arch={arch}", "-lineinfo", "-w", "-Xcompiler", "-fPIC"
    return [nvcc, "-x", "cu", *options, f"-I{EMULATION / 'gpu'}", "-include", "emulation.h"]


def _with_precompiled_header(compiler: list[Any], folder: Path) -> list[Any]:
    """The standard library, which every source includes and which is most of what the compiler
    reads. The rest of emulation.h asks for the name of the source."""
    header = folder / "precompiled.h"
    standard = re.findall(r"^#include <.*\n", (EMULATION / "cpu/emulation.h").read_text(), re.M)
    header.write_text("".join(standard))
    build = [*compiler, "-x", "c++-header", "-c", header, "-o", f"{header}.gch"]
    subprocess.run(build, check=True)
    return [*compiler, "-include", header]


def _build(folder: Path, arch: str | None) -> None:
    import pybind11

    compiler = _on_gpu(arch) if arch else _emulated(folder)
    external = jax.ffi.include_dir(), pybind11.get_include(), sysconfig.get_path("include")
    includes = (*(f"-I{path}" for path in (EMULATION, FFI / "cuda", FFI / "include")),)
    options = [*includes, *(x for path in external for x in ("-isystem", path))]
    ours = [x for x in (FFI / "cuda").rglob("*.c[cu]") if x.name != "module.cc"]
    # Those of most lines are compiled for longest, so they come first.
    ours.sort(key=lambda source: source.stat().st_size, reverse=True)
    sources = [*ours, EMULATION / "module.cc"]
    objects = [folder / f"{i}.o" for i in range(len(sources))]

    compiler += ["-DRWKV_JAX_SMALL_TESTS", f"-DRWKV_JAX_SCRATCH_GAP={GAP}", *options]
    if not arch:
        compiler = _with_precompiled_header(compiler, folder)

    def run(source: Path, to: Path) -> None:
        # The module is pybind11 more than anything that takes time to run.
        quick = ["-O0"] if source.parent == EMULATION and not arch else []
        subprocess.run([*compiler, *quick, "-c", source, "-o", to], check=True)

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, sources, objects))
    link = [compiler[0], "-shared", *(["-cudart", "shared"] if arch else []), *objects]
    subprocess.run([*link, "-o", folder / f"{NAME}.so"], check=True)


def load(folder: Path, arch: str | None = None) -> Any:
    """The module in a folder, which is built if it is not there: for the CPU, or for a GPU."""
    if not (folder / f"{NAME}.so").exists():
        _build(folder, arch)
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Device(NamedTuple):
    """The multiprocessors of a GPU, the bytes of shared memory that a block can have, and whether
    kernels for compute capability 9.0 alone may run."""

    multiprocessors: int
    shared_memory: int = 232448
    hopper: bool = False


DEVICES = {name: Device(*gpu, hopper=name == "9.0") for name, gpu in GPUS.items()}


class Scratch(NamedTuple):
    """How many float32 numbers a scratch has, and where gaps of GAP numbers are between its parts
    on the device of a call."""

    floats: int
    gaps: Callable[[], Sequence[int]]


class Call(NamedTuple):
    """A call of a target, in shapes."""

    target: str
    operands: Sequence[jax.ShapeDtypeStruct]
    results: Sequence[jax.ShapeDtypeStruct]
    aliases: dict[int, int]
    attributes: dict[str, int]
    scratch: Scratch | None


class Emulation:
    """Takes the place of the native module of CUDA, and answers the package's calls.

    on_gpu: whether a GPU runs the kernels.
    share: of the scratch that a target asks for, how much it gets.
    plans: how the targets that ran since `use` have computed their calls.
    files: the source files of the kernels that the last call of each target launched.
    """

    def __init__(self, module: Any, on_gpu: bool) -> None:
        self.module, self.on_gpu = module, on_gpu
        self.has_transition, self.plan = module.has_transition, module.plan
        self.use(DEVICES["9.0"])

    def use(self, device: Device, share: float = 1.0) -> None:
        self.gpu, self.share = device, share
        self.module.set_device(*device)
        self.plans: list[dict[str, Any]] = []
        self.files: dict[str, set[str]] = {}
        self._problem: tuple[str, str, dict[str, int]] | None = None
        self._scratch: Scratch | None = None

    def device(self, ordinal: int) -> tuple[int, int] | None:
        return None if ordinal else self.gpu[:2]

    def scratch(self, op: str, name: str, **problem: int) -> int:
        # Not less than one split takes.
        gpu = {"multiprocessors": 1, "shared_memory": self.gpu.shared_memory}
        least = self.module.plan(op, name, **gpu, **problem)
        whole = self.module.scratch(op, name, **problem)
        floats = max(int(self.share * whole), min(least["scratch"], whole))
        self._problem = op, name, problem
        gaps = functools.partial(self.module.gaps, op, name, floats, **problem)
        self._scratch = Scratch(floats, gaps)
        return floats

    def block_scratch(self, **sizes: int) -> int:
        floats = self.module.block_scratch(**sizes)
        self._scratch = Scratch(floats, functools.partial(self.module.block_gaps, **sizes))
        return floats

    def _traced(
        self,
        target: str,
        results: Sequence[tuple[Sequence[int], Any]],
        *operands: Any,
        aliases: dict[int, int] | None = None,
        **attributes: int,
    ) -> Call:
        given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        made = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in results]
        # Asked for just before, unless the target takes no scratch.
        scratch, self._scratch = self._scratch, None
        return Call(target, given, made, aliases or {}, attributes, scratch)

    def call(self, target: str, results: Any, *operands: Any, **more: Any) -> tuple[Any, ...]:
        """Takes the place of `library.call`."""
        call = self._traced(target, results, *operands, **more)
        problem, self._problem = self._problem, None

        def run(*operands: jax.Array) -> list[np.ndarray]:
            found, files = self._run(call, [np.ascontiguousarray(x) for x in operands])
            self.files[target] = set(files)
            self._check_kernels(problem, self.files[target])
            return found

        return tuple(jax.pure_callback(run, call.results, *operands))

    def traced(
        self,
        function: Callable[..., Any],
        *shapes: Any,
        run_as: Callable[..., None] = internals.run_as_on_cuda,
    ) -> list[Call]:
        """The calls that a function makes of the targets of operators and layers, or of blocks,
        from shapes. Nothing is computed."""
        calls: list[Call] = []

        def record(*call: Any, **more: Any) -> tuple[jax.Array, ...]:
            calls.append(self._traced(*call, **more))
            return tuple(jnp.zeros(x.shape, x.dtype) for x in calls[-1].results)

        jax.clear_caches()
        with pytest.MonkeyPatch.context() as patch:
            run_as(patch, self, record)
            patch.setattr(internals.gpus, "why_not_hopper", lambda: None)
            jax.eval_shape(function, *shapes)
        return calls

    def of_layer(self, name: str, case: layer_functions.Case) -> list[Call]:
        """The calls of the passes of a layer function."""
        passes = functools.partial(layer_functions.value_and_gradients, name, "ffi")
        return self.traced(passes, *layer_functions.shapes(name, case))

    def of_block(self, params: Any, state: Any, rows: int, *, first: bool = False) -> Call:
        """The call of the step of a block, the first one of a model or another one."""
        width = params.ln1.weight.shape
        x = jax.ShapeDtypeStruct((rows, *width), params.ln1.weight.dtype)
        operands = params, x, None if first else x, state
        run_as = internals.run_blocks_as_on_cuda
        return self.traced(internals.step_block, *operands, run_as=run_as)[0]

    def launches(self, call: Call, device: Device) -> list[str]:
        """The sources of the kernels that a call launches on a device, without any that runs. An
        error if the device does not take one of the launches."""
        self.use(device)
        self.module.set_dry(True)
        try:
            operands, results = (
                [np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in arrays]
                for arrays in (call.operands, call.results)
            )
            return self._launch(call, operands, results)
        finally:
            self.module.set_dry(False)

    def run(self, call: Call, operands: Sequence[np.ndarray], device: Device) -> list[np.ndarray]:
        """The results of a call on a device."""
        self.use(device)
        return self._run(call, operands)[0]

    def _run(
        self, call: Call, operands: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[str]]:
        """Results, on buffers of ones in all bits, which are NaN, and the sources of kernels."""
        operands = [x.copy() if i in call.aliases else x for i, x in enumerate(operands)]
        results = [
            np.full(x.size * x.dtype.itemsize, 0xFF, np.uint8).view(x.dtype).reshape(x.shape)
            for x in call.results
        ]
        files = self._launch(call, operands, results)
        if call.scratch and call.scratch.floats and not INITCHECK:
            shape = (call.scratch.floats,)
            (scratch,) = (x for x in results if x.shape == shape and x.dtype == np.float32)
            between = np.add.outer(call.scratch.gaps(), np.arange(GAP)).astype(int)
            written = scratch.view(np.uint32)[between] != 0xFFFFFFFF
            assert not written.any(), "a gap was written"
        return results, files

    def _launch(
        self, call: Call, operands: list[np.ndarray], results: list[np.ndarray]
    ) -> list[str]:
        for operand, result in call.aliases.items():
            results[result] = operands[operand]
        try:
            self.module.call(call.target, operands, results, call.attributes)
        finally:
            launches = self.module.launches()
        return [Path(file).name for file, *_ in launches]

    def _check_kernels(
        self, problem: tuple[str, str, dict[str, int]] | None, files: set[str]
    ) -> None:
        """The kernels launched are those that the plan for the device announces."""
        if not problem or not files:
            return
        op, name, sizes = problem
        gpu = dict(zip(("multiprocessors", "shared_memory"), self.gpu, strict=False))
        plan = self.module.plan(op, name, **gpu, **sizes)
        on_matrix_units = bool(files & {"scan.cu", "gradients.cu"})
        assert on_matrix_units == (plan["kernel"] == "matrix units"), (plan, files)
        self.plans.append(plan)

    @property
    def on_matrix_units(self) -> bool:
        return any(plan["kernel"] == "matrix units" for plan in self.plans)


@pytest.fixture(scope="session")
def emulation(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Emulation:
    """Built by the first of the workers that need it."""
    arch = pytestconfig.getoption("--kernels-on-gpu")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "emulation"
    folder.mkdir(exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Emulation(load(folder, arch), arch is not None)


@pytest.fixture
def emulated(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Emulation:
    internals.run_as_on_cuda(monkeypatch, emulation, emulation.call)
    emulation.use(DEVICES["9.0"])
    return emulation


@pytest.fixture
def blocks(emulation: Emulation, monkeypatch: pytest.MonkeyPatch) -> Emulation:
    """Whole blocks are emulated, and nothing else."""
    internals.run_blocks_as_on_cuda(monkeypatch, emulation, emulation.call)
    emulation.use(DEVICES["9.0"])
    return emulation
