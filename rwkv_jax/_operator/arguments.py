"""The arguments of a public function: from what a caller gives to checked operands.

Messages speak of the arguments as callers know them: of `initial_state`, or of a part of it such as
`initial_num`, where the operands of the passes are parts of a state by name.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rwkv_jax._operator import check, heads
from rwkv_jax._operator.call import Active, Forward, SegmentIds, Sequences
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments, sequences


def operands(
    op: str,
    signature: Signature,
    inputs: Mapping[str, Any],
    state: Any,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    active: Any = None,
    *,
    token: bool,
) -> Forward:
    """The operands of a call, with the axes that callers know: parameters stand once, offsets of
    sequences are [Z], and the state is empty where none was given."""
    if cu_seqlens is not None and segment_ids is not None:
        raise ValueError(f"{op}: segment_ids with cu_seqlens; accepted is None for one of them")
    given = {name: _broadcast_per_head(signature, name, inputs) for name in signature.inputs}
    parts = _parts(op, signature, state, token=token)
    axes = signature.arguments(token=token, sequences=cu_seqlens is not None)
    states = [*list(axes)[len(given) :], *float32(signature, given)]
    arrays = check.arrays(op, axes, given | parts, states=states)
    heads.check(op, signature.inputs, arrays, signature.y)
    sizes = signature.row_sizes(arrays)
    packing = None
    if cu_seqlens is not None:
        packing = Sequences(_checked_offsets(op, cu_seqlens, sizes, axes, arrays))
    elif segment_ids is not None:
        packing = SegmentIds(segments.checked(op, segment_ids, *sizes))
    elif active is not None:
        packing = Active(_checked_active(op, active, sizes))
    return Forward(
        {name: arrays[name] for name in given},
        {part: arrays[signature.part(part, token=token)] for part in signature.state if parts},
        packing,
    )


def float32(signature: Signature, given: Mapping[str, Any]) -> list[str]:
    """The inputs that are float32 where they may be, whatever the dtype of the others."""
    return [x for x in signature.float32 if getattr(given[x], "dtype", None) == jnp.float32]


def _checked_offsets(
    op: str,
    offsets: Any,
    sizes: tuple[int, ...],
    axes: Mapping[str, str],
    arrays: Mapping[str, Array],
) -> Array:
    offsets = sequences.checked(op, offsets, *sizes)
    for name, letters in axes.items():
        if "S" in letters and name in arrays and len(arrays[name]) != len(offsets) - 1:
            raise ValueError(
                f"{op}: {name} has shape {arrays[name].shape}, so S = {len(arrays[name])}, where "
                f"cu_seqlens has S + 1 = {len(offsets)}"
            )
    return offsets


def _checked_active(op: str, active: Any, sizes: tuple[int, ...]) -> Array:
    check.array(op, "active", active)
    if active.dtype != bool:
        raise TypeError(f"{op}: active is {active.dtype}; accepted is bool")
    if active.shape != sizes:
        raise ValueError(f"{op}: active has shape {active.shape}; accepted is [B] = {sizes}")
    return jnp.asarray(active)


def _broadcast_per_head(signature: Signature, name: str, inputs: Mapping[str, Any]) -> Any:
    """A parameter of each head as one of each channel. Whatever is wrong stays as it is, for the
    checks to refuse."""
    x = inputs[name]
    one = isinstance(x, jax.Array | np.ndarray) and x.ndim == 2 and x.shape[1] == 1
    if name not in signature.per_head or not one:
        return x
    full = next(n for n, axes in signature.inputs.items() if "B" in axes and "K" in axes)
    return jnp.broadcast_to(x, (x.shape[0], *np.shape(inputs[full])[-1:]))


def _parts(op: str, signature: Signature, state: Any, *, token: bool) -> dict[str, Any]:
    """The parts of a state by the names of messages; none if a sequence starts without one."""
    names = [signature.part(part, token=token) for part in signature.state]
    if state is None and not token:
        return {}
    if signature.state_type is None:
        return {names[0]: state}
    if not (isinstance(state, tuple) and len(state) == len(names)):
        accepted = getattr(signature.state_type, "__name__", signature.state_type)
        argument = "state" if token else "initial_state"
        raise TypeError(f"{op}: {argument} is a {type(state).__name__}; accepted is a {accepted}")
    return dict(zip(names, state, strict=True))
