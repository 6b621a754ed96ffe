"""Operators on many devices: batch, heads and sequence, each along mesh axes of its own.

Under plain `jit` each device computes the batch rows and heads that it has, without this module. A
distributed sequence has to be asked for: then only summaries, of about the size of a state, cross
devices in the forward and the backward pass, however long the sequence is.

`shard` takes and returns arrays of global shape; `sequence_parallel` is for a `shard_map` of your
own.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import jax
from jax.sharding import AxisType, NamedSharding

from rwkv_jax._operator import check
from rwkv_jax._operator.arguments import Call
from rwkv_jax._operator.call import Forward, Sequences
from rwkv_jax._operator.dispatch import named
from rwkv_jax._operator.partition import axis_names, spec_of
from rwkv_jax._operator.public import PublicFunction, find

Fn = TypeVar("Fn", bound=Callable[..., Any])

Axes: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes that an array axis is distributed along, in this order; None if it is not."""


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
      TypeError: `operator` is not a registered operator.
      ValueError: an axis is not one of the mesh, or is named twice, or a step is given a
        sequence. The returned function raises it if a size is not a multiple of the number of
        devices.
    """
    function = find(operator)
    if function.is_step and sequence is not None:
        raise ValueError(
            f"{function.name}: sequence is {sequence!r}; accepted is None, for one token"
        )
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"{function.name}: mesh is None and no mesh is set; accepted is a mesh, or None "
                "within jax.set_mesh"
            )
    places = {"batch": batch, "heads": heads, "sequence": sequence}
    _check_places(function.name, mesh, places)
    letters = {"B": batch, "T": sequence, "H": heads, "C": heads}

    @functools.wraps(operator)
    def sharded(*args: Any, **named: Any) -> tuple[Any, Any]:
        call = _bind(function, args, named)
        if isinstance(call.operands.packing, Sequences):
            _check_places_of_sequences(function.name, places)
        axes = function.axes(call.operands)
        _check_sizes(function.name, mesh, letters, axes, call.operands)
        specs = jax.tree.map(lambda axes: spec_of(letters, axes), axes)
        operands = call.operands
        if AxisType.Explicit in mesh.axis_types:
            operands = jax.tree.map(
                lambda x, axes: jax.sharding.reshard(
                    x, NamedSharding(mesh, spec_of(letters, axes))
                ),
                operands,
                axes,
            )
        if any(x.size == 0 for x in jax.tree.leaves(operands)):
            # A shard_map whose operands are all constants, as empty arrays are, does not compile.
            return function.results(*function.compute(call.options, operands))
        y, state = function.result_axes(call.operands)
        compute = jax.shard_map(
            lambda operands: function.compute(call.options, operands, sequence),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax.tree.map(lambda axes: spec_of(letters, axes), (y, state)),
            check_vma=check_vma,
        )
        return function.results(*compute(operands))

    return cast(Fn, sharded)


def sequence_parallel(operator: Fn, axis: str | tuple[str, ...]) -> Fn:
    """The same function, inside a `shard_map` whose devices have consecutive tokens along `axis`.

    Args:
      operator: `wkv4` to `wkv7`.
      axis: the mesh axes of T, of which the `shard_map` is manual.

    Returns:
      A function with the arguments and results of `operator`. Arrays with the axis T hold the
      tokens of this device. States and parameters are the same on all devices along `axis`, and
      the final state is the one after all tokens.

    Raises:
      TypeError: `operator` is not a registered operator.
    """
    function = find(operator)
    if function.is_step:
        raise TypeError(f"{function.name} is a step; accepted are the operators on whole sequences")

    @functools.wraps(operator)
    def distributed(*args: Any, **named: Any) -> tuple[Any, Any]:
        call = _bind(function, args, named)
        if isinstance(call.operands.packing, Sequences):
            raise ValueError(
                f"{function.name}: cu_seqlens along {axis!r}; accepted is None, and segment_ids"
            )
        return function.results(*function.compute(call.options, call.operands, axis))

    return cast(Fn, distributed)


def _bind(function: PublicFunction, args: tuple[Any, ...], named: Mapping[str, Any]) -> Call:
    if named.get("slots") is not None:
        raise ValueError(
            f"{function.name}: slots over a mesh; accepted is None, and states [B, ...]"
        )
    return function.bind(*args, **named)


def _check_places(op: str, mesh: Any, places: Mapping[str, Axes]) -> None:
    taken: dict[str, str] = {}
    for place, axes in places.items():
        for axis in axis_names(axes):
            check.choice(op, place, axis, mesh.axis_names)
            if axis in taken:
                raise ValueError(
                    f"{op}: {place} is {axes!r}, and {taken[axis]} is {places[taken[axis]]!r}; "
                    "accepted are different mesh axes"
                )
            taken[axis] = place


def _check_places_of_sequences(op: str, places: Mapping[str, Axes]) -> None:
    for place in ("batch", "sequence"):
        if places[place] is not None:
            raise ValueError(
                f"{op}: cu_seqlens with {place} = {places[place]!r}; accepted with it are mesh "
                "axes of heads alone"
            )


def _check_sizes(
    op: str, mesh: Any, letters: Mapping[str, Axes], axes: Forward[str], operands: Forward
) -> None:
    for (name, x), of_x in zip(named(operands), jax.tree.leaves(axes), strict=True):
        for letter, size in zip(of_x, x.shape, strict=True):
            devices = math.prod(mesh.shape[axis] for axis in axis_names(letters.get(letter)))
            if size % devices:
                raise ValueError(
                    f"{op}: {name} has shape {x.shape}, so {letter} = {size}; accepted is a "
                    f"multiple of {devices}, the devices along {letters[letter]!r}"
                )
