"""What this installation can do."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import export

from rwkv_jax._native import library
from rwkv_jax._operator import check, dispatch
from rwkv_jax._operator.call import Marks, Sequences
from rwkv_jax._operator.public import registered
from rwkv_jax._packing import segments, sequences


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
      cu_seqlens: as the operator takes it, if it does.
      decay: as the operator takes it.
      precision: as the operator takes it.
      platform: "cpu", "cuda" or another JAX platform; the default backend's if None.
      details: say of an implementation that can run in a few words how it does (which kernels and
        in what arithmetic), in place of None. For "ffi" on CUDA this is asked of the native code
        that decides it, for the first GPU, or for one like an H100 where there is none.

    Returns:
      For each implementation, None if it can run this call and its gradient, or the reason why not.

    Raises:
      ValueError: `op` is unknown, or operands are too few or too many.
    """
    functions = {function.name: function for function in registered()}
    function = functions[check.choice("implementations", "op", op, functions)]
    signature, arguments = function.operator.signature, function.arguments
    names, states = list(arguments), list(arguments)[len(signature.inputs) :]
    if len(operands) not in (len(names), len(names) - len(states)):
        raise ValueError(
            f"implementations: {op} takes the operands {', '.join(names)}, the state optional "
            f"here; {len(operands)} were given"
        )
    given = dict(zip(names, operands, strict=False))
    axes = arguments if cu_seqlens is None else function.arguments_of_sequences
    check.shapes(op, axes, given, states)
    inputs = {name: given[name] for name in signature.inputs}
    packing = None
    if cu_seqlens is not None:
        packing = Sequences(sequences.checked(op, cu_seqlens, *signature.row_sizes(inputs)))
    elif segment_ids is not None:
        ids = segments.checked(op, segment_ids, *function.row_sizes(inputs))
        # Implementations get a mark for each token of sequences; here the shape alone counts.
        packing = None if function.is_step else Marks(ids)
    options = check.options(
        op, function.operator, decay=decay, precision=precision, implementation=None
    )
    if platform is None:
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    return dispatch.reasons(function.operator, options, platform, inputs, packing, details=details)


def build_info() -> dict[str, Any]:
    """How the native modules of this installation were built, and why one of them is missing.

    Returns:
      A dictionary. "cxx" and "cuda_compiler" are the compilers, "cpu_isas" the instruction sets
      among which the CPU kernels choose at run time, and "cuda_archs" the GPU architectures that
      the CUDA kernels are compiled for. "missing" has for each platform None where its kernels are
      loaded, or the reason why they are not.
    """
    cpu, cuda = (library.build(library.MODULES[platform]) for platform in ("cpu", "cuda"))
    return {
        "cxx": getattr(cpu, "CXX", None),
        "cpu_isas": getattr(cpu, "CPU_ISAS", ()),
        "cuda_compiler": getattr(cuda, "CUDA_COMPILER", "") or None,
        "cuda_archs": getattr(cuda, "CUDA_ARCHS", ()),
        "missing": dict(library.MISSING),
    }


def export_checks() -> Sequence[export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise a program that calls
    the native kernels, or Pallas kernels on a GPU: those of operators, and of the models, layer
    functions and losses that are imported. The process that loads the program must have imported
    `rwkv_jax`."""
    targets = library.declared() | {
        target
        for function in registered()
        for implementation in function.operator.implementations.values()
        for target in implementation.targets
    }
    return [export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
