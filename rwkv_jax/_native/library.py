"""The native modules: loading them, registering their targets, and asking and calling them."""

import functools
import importlib
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _cuda_module() -> str:
    """The module that was built with this package, or that of a wheel of CUDA kernels, preferably
    the one for the CUDA version that JAX uses."""
    versions = sorted(("13", "12"), key=lambda v: not _is_installed(f"jax_cuda{v}_plugin"))
    names = ["rwkv_jax._cuda", *(f"rwkv_jax_cuda{version}._cuda" for version in versions)]
    return next(filter(_is_installed, names), names[0])


def build(module: str) -> Any:
    """How a module, or any of the same package, was built, or None if the package was not built."""
    try:
        return importlib.import_module(f"{module.rpartition('.')[0]}._build")
    except ModuleNotFoundError:
        return None


MODULES = {"cpu": "rwkv_jax._cpu", "cuda": _cuda_module()}
VERSION: str = getattr(build(MODULES["cpu"]), "VERSION", "0+unknown")
REGISTRY_NAMES = {"cpu": "cpu", "cuda": "CUDA"}


@functools.cache
def _runtime_version() -> tuple[int, int]:
    """The version of the XLA FFI that this jaxlib has, from the headers it ships."""
    text = pathlib.Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")
    )
    if not (major and minor):
        raise ImportError("this jaxlib does not say which XLA FFI version it speaks")
    return int(major[1]), int(minor[1])


def _load(platform: str, name: str) -> str | None:
    """Register the targets of one module; the reason where that is impossible."""
    try:
        module = importlib.import_module(name)
        runtime = _runtime_version()
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return (
                f"this installation has no {platform.upper()} kernels (rwkv_jax.build_info()); "
                + _HOW_TO_GET[platform]
            )
        return f"{name} cannot be loaded: {error}"
    version = getattr(build(name), "VERSION", VERSION)
    if version != VERSION:
        distribution = name.partition(".")[0].replace("_", "-")
        return (
            f"{distribution} has version {version} and rwkv-jax {VERSION}; "
            f"install {distribution}=={VERSION}"
        )
    # Registering a handler that is newer than the runtime would break every later JAX computation.
    if module.ffi_version() > runtime:
        built = ".".join(map(str, module.ffi_version()))
        return (
            f"{name} was built for XLA FFI {built} and this jaxlib speaks "
            f"{'.'.join(map(str, runtime))}; reinstall rwkv-jax or upgrade jax"
        )
    for target, capsule in module.registrations().items():
        jax.ffi.register_ffi_target(target, capsule, platform=REGISTRY_NAMES[platform])
    return None


_HOW_TO_GET = {
    "cpu": "reinstall rwkv-jax with a C++ compiler on PATH",
    "cuda": "install rwkv-jax-cuda13 or rwkv-jax-cuda12, or reinstall rwkv-jax from source "
    "with RWKV_JAX_CUDA=ON and nvcc on PATH or in CUDACXX",
}

MISSING: dict[str, str | None] = {platform: _load(platform, m) for platform, m in MODULES.items()}
"""For each platform, why its native module is missing, or None where it is there."""


def why_not(platform: str) -> str | None:
    """Why no native kernel runs on a platform, or None."""
    return MISSING.get(platform, "native kernels exist for CPUs and for CUDA GPUs")


def module(platform: str) -> Any:
    """The native module of a platform, which is there."""
    return importlib.import_module(MODULES[platform])


def scratch(platform: str, op: str, name: str, **problem: int) -> int:
    """How many float32 numbers of scratch the target of a pass needs at most, on any device.
    Kernels may not allocate, so their scratch is one more result."""
    return module(platform).scratch(op, name, **problem)


def block_scratch(**problem: int) -> int:
    """How many float32 numbers of scratch the step of a whole block takes."""
    return module("cuda").block_scratch(**problem)


def has_transition(platform: str, op: str, **problem: int) -> bool:
    """Whether the transition targets take a call. If so, they do on every device."""
    return module(platform).has_transition(op, **problem)


_declared: set[str] = set()


def register_export_targets(*targets: str) -> None:
    """Name targets that programs may call besides those of operators."""
    _declared.update(targets)


def export_targets() -> frozenset[str]:
    """The targets that have been declared, of whatever is imported."""
    return frozenset(_declared)


def call(
    target: str,
    results: Sequence[tuple[Sequence[int], Any]],
    *operands: Array,
    aliases: dict[int, int] | None = None,
    **attributes: int,
) -> tuple[Array, ...]:
    """Call a target. Results, given as (shape, dtype), vary over the operands' manual mesh axes."""
    like = jax.typeof(operands[0])
    types = tuple(like.update(shape=s, dtype=np.dtype(d), weak_type=False) for s, d in results)
    # JAX caches eager calls by the value of an attribute, so its type is fixed in this one place.
    typed = {name: np.int64(value) for name, value in attributes.items()}
    return tuple(jax.ffi.ffi_call(target, types, input_output_aliases=aliases)(*operands, **typed))
