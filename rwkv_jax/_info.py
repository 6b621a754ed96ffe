"""What this installation can do."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import export

from rwkv_jax import _pallas
from rwkv_jax._native import library
from rwkv_jax._operator import arguments, check, heads
from rwkv_jax._operator.call import Forward, Marks, Packing, Sequences
from rwkv_jax._operator.dispatch import OTHER, PLATFORMS, platform_of
from rwkv_jax._operator.operator import PUBLIC
from rwkv_jax._packing import segments, sequences


class Availability(NamedTuple):
    """Whether an implementation can run a call.

    available: whether it can run the call and its gradient.
    reason: why it cannot, or None.
    description: in a few words how it computes the call (which kernels and in what arithmetic), or
      None where it cannot. For "ffi" on CUDA this is asked of the native code that decides it, for
      the GPUs that are here, or for one like an H100 where there is none.
    """

    available: bool
    reason: str | None
    description: str | None


def implementations(
    op: str,
    *operands: Any,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    decay: str | None = None,
    precision: Any = None,
    platform: str | None = None,
) -> dict[str, Availability]:
    """Which implementations of an operator can run a call, how, and why the others cannot.

    Args:
      op: the name of a public operator, such as "wkv7".
      operands: its array arguments, or `jax.ShapeDtypeStruct`s of them; the state may be left out.
      segment_ids: as the operator takes it, if it does.
      cu_seqlens: as the operator takes it, if it does.
      decay: as the operator takes it; if None, the form of the official models.
      precision: as the operator takes it.
      platform: "cpu", "cuda" or another JAX platform; the default backend's if None.

    Returns:
      An `Availability` for each implementation, by its name.

    Raises:
      ValueError: `op` is unknown, operands are too few or too many, or a step is given segments or
        sequences.
      TypeError: an operand is no array, or `platform` no name.
    """
    functions = {function.__name__: operator for function, operator in PUBLIC.items()}
    operator = functions[check.choice("implementations", "op", op, functions)]
    token, signature = op != operator.name, operator.signature
    names = list(signature.arguments(token=token))
    states = names[len(signature.inputs) :]
    if len(operands) not in (len(names), len(names) - len(states)):
        raise ValueError(
            f"implementations: {op} takes the operands {', '.join(names)}, the state optional "
            f"here; {len(operands)} were given"
        )
    if token and not (segment_ids is None and cu_seqlens is None):
        raise ValueError(f"implementations: {op} takes neither segment_ids nor cu_seqlens")
    given = dict(zip(names, operands, strict=False))
    for name, x in given.items():
        if not isinstance(x, jax.ShapeDtypeStruct):
            check.array(op, name, x)
    axes = signature.arguments(token=token, sequences=cu_seqlens is not None)
    check.shapes(op, axes, given, [*states, *arguments.float32(signature, given)])
    inputs = {name: given[name] for name in signature.inputs}
    heads.check(op, signature.inputs, inputs, signature.y)
    sizes = signature.row_sizes(inputs)
    packing: Packing = None
    if cu_seqlens is not None:
        packing = Sequences(sequences.checked(op, cu_seqlens, *sizes))
    elif segment_ids is not None:
        # Implementations get a mark for each token; here the shape alone counts.
        packing = Marks(segments.checked(op, segment_ids, *sizes))
    decay = next(reversed(signature.decays), None) if decay is None else decay
    options = operator.options(decay, precision, None, token=token)
    if not isinstance(platform, str | None):
        raise TypeError(f"implementations: platform is {platform!r}; accepted are a name and None")
    platform = platform_of(platform or jax.default_backend())
    platform = platform if platform in PLATFORMS else OTHER

    def availability(choice: str) -> Availability:
        call = Forward(inputs, {}, packing)
        if reason := operator.why_not("forward", choice, options, platform, call):
            return Availability(False, reason, None)
        return Availability(True, None, operator.describe(choice, options, platform, call))

    return {choice: availability(choice) for choice in operator.implementations}


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


def export_disabled_checks() -> Sequence[export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs to serialise a program that calls
    the native kernels, or Pallas kernels on a GPU: those of operators, and of the models, layer
    functions and losses that are imported. The process that loads the program must have imported
    `rwkv_jax`."""
    targets = library.export_targets() | {_pallas.TRITON_TARGET}
    return [export.DisabledSafetyCheck.custom_call(target) for target in sorted(targets)]
