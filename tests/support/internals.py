"""The private names of the package that tests know, all in this one place."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from rwkv_jax import _dispatch, _ffi, _over_devices, _sequences
from rwkv_jax._chunked import CHUNK as CHUNK

LONG_SEQUENCE = _sequences.LONG
"""Tokens for each sequence from which on native kernels take the longest sequences first."""


def operator(op: str) -> Any:
    """The package's own account of an operator on whole sequences."""
    return importlib.import_module(f"rwkv_jax.{op}").OPERATOR


def axes_of_arguments(op: str) -> Mapping[str, str]:
    """The axis letters of the arguments of an operator, by name."""
    return operator(op).arguments


def axes_of_sequences(op: str) -> Mapping[str, str]:
    """The axis letters of the arguments with `cu_seqlens`."""
    return operator(op).arguments_of_sequences


def axes_of_results(op: str) -> Mapping[str, str]:
    """The axis letters of `y` and of the final state."""
    return operator(op).reference.results


def axes_of_state(op: str) -> Mapping[str, str]:
    return operator(op).state


def summaries(op: str) -> Any:
    """The functions on the summaries of an operator: AXES, combine, apply."""
    return operator(op).segments


def run_pass(
    op: str, name: str, operands: Any, *, decay: str, implementation: str | None, precision: Any
) -> tuple[jax.Array, ...]:
    """A pass of an operator, such as "summary"; parameters have the axis B."""
    called = getattr(operator(op), name)
    options = operator(op).options(
        called, decay=decay, precision=precision, implementation=implementation
    )
    return _dispatch.call(called, options, *operands)


def targets(op: str, *passes: str, kind: str = "") -> set[str]:
    """The native targets for passes of an operator: "fwd", "bwd", "step", "summary" or
    "reverse_summary". Kernels on matrix units are of the kind "chunk", and "sequences" are the same
    for `cu_seqlens`."""
    return {"_".join(filter(None, ("rwkv", op, kind, name, "v1"))) for name in passes}


def missing(platform: str) -> str | None:
    """Why a platform has no native kernels, or None where it has them."""
    return _ffi.MISSING.get(platform)


def pretend(monkeypatch: pytest.MonkeyPatch, platform: str, reason: str | None) -> None:
    """The native module of a platform is missing for a reason, or is there."""
    monkeypatch.setitem(_ffi.MISSING, platform, reason)
    jax.clear_caches()


def pretend_matrix_units_fit(monkeypatch: pytest.MonkeyPatch, fit: bool) -> None:
    """The GPUs have enough shared memory for the kernels on matrix units, or not."""
    monkeypatch.setattr(_ffi, "fits_matrix_units", lambda: fit)
    jax.clear_caches()


def load_native(platform: str, module: str) -> str | None:
    """Register the targets of a native module; the reason where that is impossible."""
    return _ffi._load(platform, module)


def fail_to_import(monkeypatch: pytest.MonkeyPatch, fail: Any) -> None:
    """`fail` is called in place of the import of a native module."""
    monkeypatch.setattr(_ffi.importlib, "import_module", fail)


def split_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a sequence over devices are split on each device from 128 tokens on."""
    monkeypatch.setattr(_over_devices, "PART", CHUNK)
    monkeypatch.setattr(_over_devices, "ENOUGH", 1 << 30)


def split_on_a_gpu(monkeypatch: pytest.MonkeyPatch, op: str, splits: int) -> None:
    """The kernels on matrix units cut each sequence into so many splits."""
    module = importlib.import_module(f"rwkv_jax.{'wkv7' if op == 'wkv7' else 'wkv6'}.ffi")
    monkeypatch.setattr(module, "_scan_segments", lambda *_: splits)
    jax.clear_caches()


def pallas() -> Any:
    """The module of the Pallas kernels, which is imported where it is first asked for."""
    return importlib.import_module("rwkv_jax._pallas")


def why_pallas_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, operands: Any) -> str | None:
    """The reason of the Pallas kernels of WKV7 not to run where Pallas itself is not there."""
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas", None)
    monkeypatch.delitem(sys.modules, "rwkv_jax._pallas")
    monkeypatch.delitem(sys.modules, "rwkv_jax.wkv7.pallas", raising=False)
    lazy = _dispatch.Lazy("rwkv_jax.wkv7.pallas")
    options = _dispatch.Options("log", jax.lax.Precision.DEFAULT, None)
    return lazy.why_not("cuda", "forward", options, operands)
