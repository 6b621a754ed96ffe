"""What this installation can do."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax
from jax import export

from rwkv_jax import _check, _dispatch, _ffi, _packing, _sequences
from rwkv_jax.wkv4 import OPERATOR as WKV4
from rwkv_jax.wkv5 import OPERATOR as WKV5
from rwkv_jax.wkv6 import OPERATOR as WKV6
from rwkv_jax.wkv7 import OPERATOR as WKV7

_OPERATORS = (WKV4, WKV5, WKV6, WKV7)
_CALLS = {x.name: (x, x.arguments, (x.forward, x.backward)) for x in _OPERATORS} | {
    x.step.op: (x, x.step_arguments, (x.step,)) for x in _OPERATORS
}

_TRITON = "__gpu$xla.gpu.triton"
"""The target in which JAX puts a Pallas kernel for a GPU."""


def implementations(
    op: str,
    *operands: Any,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    decay: str = "log",
    precision: Any = None,
    platform: str | None = None,
    details: bool = False,
) -> dict[str, str | None]:
    """Which implementations of an operator can run a call, and why the others cannot.

    Args:
      op: the name of a public operator, such as "wkv7".
      operands: its array arguments, or `jax.ShapeDtypeStruct`s of them; the state may be left out.
      segment_ids: as the operator takes it, if it does.
      cu_seqlens: likewise.
      decay: as the operator takes it.
      precision: as the operator takes it.
      platform: "cpu", "cuda" or another JAX platform; the default backend's if None.
      details: say of an implementation that can run in a few words how it does (which kernels and
        in what arithmetic), in place of None.

    Returns:
      For each implementation, None if it can run this call and its gradient, or the reason why not.

    Raises:
      ValueError: `op` is unknown, or operands are too few or too many.
    """
    operator, arguments, stages = _CALLS[_check.choice("implementations", "op", op, _CALLS)]
    names, states = list(arguments), list(arguments)[len(operator.inputs) :]
    if len(operands) not in (len(names), len(names) - len(states)):
        raise ValueError(
            f"implementations: {op} takes the operands {', '.join(names)}, the state optional "
            f"here; {len(operands)} were given"
        )
    named = dict(zip(names, operands, strict=False))
    if cu_seqlens is not None:
        arguments, stages = operator.arguments_of_sequences, operator.of_sequences[:2]
    _check.shapes(op, arguments, named, states)
    if cu_seqlens is not None:
        cu = _sequences.checked(op, cu_seqlens, *named["v"].shape[:2])
        named |= {"cu_seqlens": cu, "marks": cu}
    if segment_ids is not None:
        named["marks"] = _packing.checked(op, segment_ids, named["v"].shape[:2])
    options = operator.options(stages[0], decay=decay, precision=precision, implementation=None)
    if platform is None:
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return _dispatch.implementations(stages, options, named, platform, details)


def build_info() -> dict[str, Any]:
    """How the native modules of this installation were built, and why one of them is missing.

    Returns:
      "cxx" and "cuda_compiler": the compilers; "cpu_isas": the instruction sets among which the CPU
      kernels choose at run time; "cuda_archs": the GPU architectures compiled for; "missing": for
      each platform, None where its kernels are loaded, or the reason why they are not.
    """
    info: dict[str, Any] = {"cxx": None, "cpu_isas": (), "cuda_compiler": None, "cuda_archs": ()}
    try:
        _build: Any = importlib.import_module("rwkv_jax._build")  # written by the build
    except ModuleNotFoundError:
        pass
    else:
        info = {
            "cxx": _build.CXX,
            "cpu_isas": _build.CPU_ISAS,
            "cuda_compiler": _build.CUDA_COMPILER or None,
            "cuda_archs": _build.CUDA_ARCHS,
        }
    return info | {"missing": dict(_ffi.MISSING)}


def export_checks() -> Sequence[export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise a program that calls
    the native kernels, or those of Pallas on a GPU. The process that loads the program must have
    imported `rwkv_jax`."""
    targets = [t for op in _OPERATORS for t in op.implementations["ffi"].TARGETS]
    return [export.DisabledSafetyCheck.custom_call(t) for t in (*targets, _TRITON)]
