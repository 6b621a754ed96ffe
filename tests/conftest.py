import functools
import gc
import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

# Before JAX is imported: several CPU devices for the sharding tests, and what train.py sets.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=4 --xla_gpu_deterministic_ops=true"
)
# Several test processes share one GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jaxtyping
import pytest

# Each collection goes over all that JAX has traced and compiled, and also calls jaxlib's own.
gc.set_threshold(50_000, 20, 50)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# A GPU multiplies float32 matrices in TF32 unless told otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

# Before rwkv_jax is imported: its annotations are checked at run time, in tests only.
importlib.import_module("support.annotations")
jaxtyping.install_import_hook("rwkv_jax", "support.annotations.checked")

rwkv_jax = importlib.import_module("rwkv_jax")

pytest_plugins = ["support.commands", "support.emulation", "support.scripts"]

# Files whose tests need what is not here; RWKV_JAX_REQUIRE says that it has to be.
PLATFORM = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
NATIVE = rwkv_jax.build_info()["missing"].get(PLATFORM, "no such kernels") is None
LIBTPU = importlib.util.find_spec("libtpu") is not None
LM_EVAL = importlib.util.find_spec("lm_eval") is not None
OFFICIAL, PEERS = (
    all(importlib.util.find_spec(name) is not None for name in ("torch", package))
    for package in ("rwkv", "transformers")
)
collect_ignore = [
    file
    for file, there in {
        "test_ffi.py": NATIVE,
        "test_gpu.py": NATIVE and PLATFORM == "cuda",
        "test_lm_eval.py": LM_EVAL,
        "test_official.py": OFFICIAL,
        "test_peers.py": PEERS,
        "test_tpu.py": LIBTPU,
    }.items()
    if not there
]


def pytest_addoption(parser: pytest.Parser) -> None:
    from support.cases import GPUS

    parser.addoption(
        "--limit-gpus",
        metavar="COMPUTE_CAPABILITY",
        choices=sorted(GPUS),
        help="GPUs are taken to have no more multiprocessors and shared memory than one of these",
    )
    parser.addoption(
        "--every-row",
        action="store_true",
        help="test_launches.py: every number of rows, where some take minutes to emulate",
    )
    parser.addoption(
        "--kernels-on-gpu",
        metavar="ARCH",
        help="test_emulation.py: no emulation, but the kernels on a GPU, compiled for e.g. sm_90a",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """RWKV_JAX_REQUIRE=cpu,cuda,official,peers,libtpu,lm-eval: native kernels, the official models,
    those of `transformers`, the compiler for TPUs, and lm-evaluation-harness, that have to be
    there, so that nothing is left out unnoticed on a machine that is known to have them."""
    if limits := session.config.getoption("--limit-gpus"):
        from support import internals
        from support.cases import GPUS

        internals.native_module("cuda").limit_devices(*GPUS[limits], hopper=limits == "9.0")
    missing = {
        **rwkv_jax.build_info()["missing"],
        "official": None if OFFICIAL else "torch or rwkv is not installed",
        "peers": None if PEERS else "torch or transformers is not installed",
        "libtpu": None if LIBTPU else "libtpu is not installed",
        "lm-eval": None if LM_EVAL else "lm-eval is not installed",
    }
    for required in filter(None, os.environ.get("RWKV_JAX_REQUIRE", "").split(",")):
        reason = missing[required]
        if reason is None and required in ("cpu", "cuda"):
            try:
                jax.devices(required)
            except RuntimeError as error:
                reason = str(error)
        if reason is not None:
            pytest.exit(f"RWKV_JAX_REQUIRE: {required}: {reason}", returncode=1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick run has the first case of each test; for `pytest.mark.quick(*parameters)` the first
    one with each value of each of these parameters, such as "op", "case.dtype" or, for each pair of
    values, "op,dtype"; for `pytest.mark.quick` every case; and for `pytest.mark.slow` none."""
    seen = set()
    for item in items:
        if item.get_closest_marker("slow"):
            continue
        mark = item.get_closest_marker("quick")
        if mark and not mark.args:
            continue
        given = getattr(getattr(item, "callspec", None), "params", {})
        test = item.nodeid.partition("[")[0]
        values = [_values(given, parameters) for parameters in (mark.args if mark else ())]
        shown = {(test, *value) for value in values if value} or {(test,)}
        if shown <= seen:
            item.add_marker(pytest.mark.slow)
        seen |= shown


def _values(given: dict[str, Any], parameters: str) -> list[str]:
    """The parameters with their values, or nothing where a test lacks one."""
    paths = [parameter.split(".") for parameter in parameters.split(",")]
    if not all(name in given for name, *_ in paths):
        return []
    # A test without any case has a value of pytest's own.
    found = (
        functools.reduce(lambda x, n: getattr(x, n, None), x, given[name]) for name, *x in paths
    )
    return [parameters, *map(str, found)]


@pytest.fixture
def cpus() -> list[Any]:
    """The forced CPU devices, on a machine with a GPU as well."""
    devices = jax.devices("cpu")
    assert len(devices) == 4
    return devices


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Without the run-time checks of annotations, which would answer before the package's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Say that the native module of a platform is missing for a reason, or there."""
    from support import internals

    yield lambda platform, reason: internals.pretend(monkeypatch, platform, reason)
    monkeypatch.undo()
    jax.clear_caches()
