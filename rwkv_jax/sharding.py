"""Operators on many devices: batch, heads and sequence, each along mesh axes of its own.

Plain `jit` needs nothing of this for batch and heads: they are computed where they are. A sequence
that is distributed has to be asked for, and only summaries of it, of about the size of a state,
cross devices, forward and backward, however long it is.

`shard` takes and returns arrays of global shape; `sequence_parallel` is for a `shard_map` of your
own.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import jax
from jax.sharding import AxisType, NamedSharding

from rwkv_jax import _check, _packing
from rwkv_jax._operator import Operator
from rwkv_jax._partition import axis_names, spec_of
from rwkv_jax.wkv4 import OPERATOR as WKV4
from rwkv_jax.wkv4 import wkv4, wkv4_step
from rwkv_jax.wkv5 import OPERATOR as WKV5
from rwkv_jax.wkv5 import wkv5, wkv5_step
from rwkv_jax.wkv6 import OPERATOR as WKV6
from rwkv_jax.wkv6 import wkv6, wkv6_step
from rwkv_jax.wkv7 import OPERATOR as WKV7
from rwkv_jax.wkv7 import wkv7, wkv7_step

Fn = TypeVar("Fn", bound=Callable[..., Any])

Axes: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes that an array axis is distributed along, in this order; None if it is not."""

_SEQUENCES = {wkv4: WKV4, wkv5: WKV5, wkv6: WKV6, wkv7: WKV7}
_STEPS = {wkv4_step: WKV4, wkv5_step: WKV5, wkv6_step: WKV6, wkv7_step: WKV7}


def shard(
    operator: Fn,
    mesh: Any = None,
    *,
    batch: Axes = None,
    heads: Axes = None,
    sequence: Axes = None,
    check_vma: bool = True,
) -> Fn:
    """The same function, computed by all devices of a mesh.

    Args:
      operator: `wkv4` to `wkv7`, or one of their steps.
      mesh: a `jax.sharding.Mesh` with axes of any type; the one that `jax.set_mesh` set if None.
      batch: mesh axes of B, such as "data" or ("replica", "data").
      heads: mesh axes of H, or of C for `wkv4`.
      sequence: mesh axes of T, for the operators on whole sequences. Each device has consecutive
        tokens, in the order of the axis.
      check_vma: as `jax.shard_map` takes it.

    Returns:
      A function with the arguments, results, derivatives and errors of `operator`, all arrays of
      global shape. States are not distributed along the sequence. `cu_seqlens` goes with `heads`
      alone, and `slots` with no mesh. It stands inside `jit` or not, and is differentiable as
      `operator` is.

    Raises:
      TypeError: `operator` is not one of the functions above.
      ValueError: an axis is not one of the mesh, or named twice, or a step is given a sequence; and
        when it is called: a size is not a multiple of its number of devices.
    """
    call = _call_of(operator)
    if call.is_step and sequence is not None:
        raise ValueError(f"{call.name}: sequence is {sequence!r}; accepted is None, for one token")
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"{call.name}: mesh is None and no mesh is set; accepted is a mesh, or None within "
                "jax.set_mesh"
            )
    places = {"batch": batch, "heads": heads, "sequence": sequence}
    _check_places(call.name, mesh, places)
    letters = {"B": batch, "T": sequence, "H": heads, "C": heads}

    @functools.wraps(operator)
    def sharded(*args: Any, **named: Any) -> tuple[Any, Any]:
        arrays, ids, cu, options = call.bind(*args, **named)
        _check_sizes(call, mesh, letters, arrays)
        if ids is not None:
            arrays["segment_ids"] = ids
        if cu is not None:
            for place in ("batch", "sequence"):
                if places[place] is not None:
                    raise ValueError(
                        f"{call.name}: cu_seqlens with {place} = {places[place]!r}; accepted with "
                        "it are mesh axes of heads alone"
                    )
            arrays["cu_seqlens"] = cu
        specs = {name: spec_of(letters, call.axes(name)) for name in arrays}
        if AxisType.Explicit in mesh.axis_types:
            arrays = {
                name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name]))
                for name, x in arrays.items()
            }
        if any(x.size == 0 for x in arrays.values()):
            # A shard_map whose operands are all constants, as empty arrays are, does not compile.
            return call.run(arrays, options, None)
        results = call.operator.step if call.is_step else call.operator.reference
        return jax.shard_map(
            lambda arrays: call.run(arrays, options, sequence),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=call.operator.packed(
                [spec_of(letters, axes) for axes in results.results.values()]
            ),
            check_vma=check_vma,
        )(arrays)

    return cast(Fn, sharded)


def sequence_parallel(operator: Fn, axis: str | tuple[str, ...]) -> Fn:
    """The same function, inside a `shard_map` whose devices have consecutive tokens along `axis`.

    Args:
      operator: `wkv4` to `wkv7`.
      axis: the mesh axes of T, of which the `shard_map` is manual.

    Returns:
      A function with the arguments and results of `operator`: of arrays with T the tokens of this
      device, of states and parameters the same on all devices along `axis`. The final state is the
      one after all tokens.

    Raises:
      TypeError: `operator` is not one of the functions above.
    """
    call = _call_of(operator)
    if call.is_step:
        raise TypeError(f"{call.name} is a step; accepted are wkv4, wkv5, wkv6, wkv7")

    @functools.wraps(operator)
    def distributed(*args: Any, **named: Any) -> tuple[Any, Any]:
        arrays, ids, cu, options = call.bind(*args, **named)
        if cu is not None:
            raise ValueError(
                f"{call.name}: cu_seqlens along {axis!r}; accepted is None, and segment_ids"
            )
        if ids is not None:
            arrays["segment_ids"] = ids
        return call.run(arrays, options, axis)

    return cast(Fn, distributed)


class _Call(NamedTuple):
    """A public function, taken apart."""

    function: Callable[..., Any]
    operator: Operator
    is_step: bool

    @property
    def name(self) -> str:
        return self.operator.step.op if self.is_step else self.operator.name

    @property
    def arguments(self) -> Mapping[str, str]:
        return self.operator.step_arguments if self.is_step else self.operator.arguments

    def axes(self, name: str) -> str:
        return {"segment_ids": "BT", "cu_seqlens": "Z"}.get(name) or self.arguments[name]

    def bind(self, *args: Any, **named: Any) -> tuple[dict[str, Any], Any, Any, Any]:
        """The arrays by name, checked, `segment_ids` and `cu_seqlens`, and the options."""
        bound = inspect.signature(self.function).bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        if given.pop("slots") is not None:
            raise ValueError(
                f"{self.name}: slots over a mesh; accepted is None, and states [B, ...]"
            )
        options = {name: given.pop(name) for name in ("decay", "precision", "implementation")}
        stage = self.operator.step if self.is_step else self.operator.forward
        state = "state" if self.is_step else "initial_state"
        ids, cu = given.pop("segment_ids", None), given.pop("cu_seqlens", None)
        if cu is not None:
            self.operator.check_without_ids(ids)
            arrays, cu = self.operator.checked_sequences(given, cu)
        else:
            arrays = self.operator.checked(self.name, self.arguments, given, state)
        if ids is not None:
            ids = self.operator.checked_ids(ids, arrays)
        return arrays, ids, cu, self.operator.options(stage, **options)

    def run(self, arrays: Mapping[str, Any], options: Any, axis: Axes) -> tuple[Any, Any]:
        if self.is_step:
            return self.operator.packed(self.operator.over_token(options, arrays))
        arrays = dict(arrays)
        ids, cu, marks = arrays.pop("segment_ids", None), arrays.pop("cu_seqlens", None), None
        if cu is not None:
            return self.operator.packed(self.operator.over_sequences(options, arrays, cu))
        if ids is not None:
            marks = _packing.marks(ids) if axis is None else _packing.over_devices(ids, axis)
        return self.operator.packed(self.operator.over_sequence(options, arrays, marks, axis))


def _call_of(function: Any) -> _Call:
    for calls in (_SEQUENCES, _STEPS):
        if function in calls:
            return _Call(function, calls[function], calls is _STEPS)
    accepted = ", ".join(f.__name__ for f in (*_SEQUENCES, *_STEPS))
    raise TypeError(f"operator is {function!r}; accepted are {accepted}")


def _check_places(op: str, mesh: Any, places: Mapping[str, Axes]) -> None:
    taken: dict[str, str] = {}
    for place, axes in places.items():
        for axis in axis_names(axes):
            _check.choice(op, place, axis, mesh.axis_names)
            if axis in taken:
                raise ValueError(
                    f"{op}: {place} is {axes!r}, and {taken[axis]} is {places[taken[axis]]!r}; "
                    "accepted are different mesh axes"
                )
            taken[axis] = place


def _check_sizes(call: _Call, mesh: Any, letters: Mapping[str, Axes], arrays: Mapping) -> None:
    for name, x in arrays.items():
        for letter, size in zip(call.arguments[name], x.shape, strict=True):
            devices = math.prod(mesh.shape[axis] for axis in axis_names(letters.get(letter)))
            if size % devices:
                raise ValueError(
                    f"{call.name}: {name} has shape {x.shape}, so {letter} = {size}; accepted is a "
                    f"multiple of {devices}, the devices along {letters[letter]!r}"
                )
