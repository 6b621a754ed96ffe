"""Operators on many devices: batch, heads and sequence, each along mesh axes of its own.

Under plain `jit` each device computes the batch rows and heads that it has, without this module. A
distributed sequence has to be asked for: then only transitions, of about the size of a state, cross
devices in the forward and the backward pass, however long the sequence is.

`shard` takes and returns arrays of global shape; `sequence_parallel` is for a `shard_map` of your
own.
"""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import jax
from jax.sharding import AxisType, NamedSharding

from rwkv_jax._devices import sequence as over_devices
from rwkv_jax._operator.call import Forward, Options, Sequences
from rwkv_jax._operator.dispatch import named
from rwkv_jax._operator.heads import repeated_unless
from rwkv_jax._operator.operator import PUBLIC, Operator, YAndState
from rwkv_jax._operator.partition import axis_names, check_places, spec_of

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
      operator: a public operator such as `wkv7`, or its step.
      mesh: a `jax.sharding.Mesh` with axes of any type; the one that `jax.set_mesh` set if None.
      batch: mesh axes of B, such as "data" or ("replica", "data").
      heads: mesh axes of H, or of C for `wkv4`.
      sequence: mesh axes of T, for the operators on whole sequences. Each device has consecutive
        tokens, in the order of the axis.
      check_vma: as `jax.shard_map` takes it.

    Returns:
      A function with the arguments, results, derivatives and errors of `operator`, all arrays of
      global shape. States are not distributed along the sequence. `cu_seqlens` goes with `heads`
      alone. It stands inside `jit` or not, and is differentiable as `operator` is.

    Raises:
      TypeError: `operator` is not a registered operator, or mesh axes are no names.
      ValueError: an axis is not one of the mesh, or is named twice, or a step is given a
        sequence. The returned function raises it if a size is not a multiple of the number of
        devices.
    """
    found, token = _find(operator)
    op = found.public_name(token=token)
    if token and sequence is not None:
        raise ValueError(f"{op}: sequence is {sequence!r}; accepted is None, for one token")
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                f"{op}: mesh is None and no mesh is set; accepted is a mesh, or None "
                "within jax.set_mesh"
            )
    places = {"batch": batch, "heads": heads, "sequence": sequence}
    check_places(op, mesh, places)
    letters = {"B": batch, "T": sequence, "H": heads, "G": heads, "C": heads}

    @functools.wraps(operator)
    def sharded(*args: Any, **named: Any) -> tuple[Any, Any]:
        options, operands = _checked(operator, found, token, args, named)
        if isinstance(operands.packing, Sequences):
            _check_places_of_sequences(op, places)
        axes = found.signature.given_axes(operands, token=token)
        devices = math.prod(mesh.shape[axis] for axis in axis_names(heads))
        inputs = repeated_unless(
            lambda groups: groups % devices == 0, axes.inputs, operands.inputs, found.signature.y
        )
        operands = dataclasses.replace(operands, inputs=inputs)
        _check_sizes(op, mesh, letters, axes, operands)
        specs = jax.tree.map(lambda axes: spec_of(letters, axes), axes)
        if AxisType.Explicit in mesh.axis_types:
            operands = jax.tree.map(
                lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), operands, specs
            )
        if any(x.size == 0 for x in jax.tree.leaves(operands)):
            # A shard_map whose operands are all constants, as empty arrays are, does not compile.
            return found.results(*found.compute(options, operands, token=token))
        state = found.signature.given_state(operands.packing)
        results = axes.inputs[found.signature.y], state
        compute = jax.shard_map(
            lambda operands: _compute(found, options, operands, token, sequence),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=jax.tree.map(lambda axes: spec_of(letters, axes), results),
            check_vma=check_vma,
        )
        return found.results(*compute(operands))

    return cast(Fn, sharded)


def sequence_parallel(operator: Fn, axis: str | tuple[str, ...]) -> Fn:
    """The same function, inside a `shard_map` whose devices have consecutive tokens along `axis`.

    Args:
      operator: a public operator such as `wkv7`.
      axis: the mesh axes of T, of which the `shard_map` is manual.

    Returns:
      A function with the arguments and results of `operator`. Arrays with the axis T hold the
      tokens of this device. States and parameters are the same on all devices along `axis`, and
      the final state is the one after all tokens.

    Raises:
      TypeError: `operator` is not a registered operator.
    """
    found, token = _find(operator)
    if token:
        op = found.public_name(token=True)
        raise TypeError(f"{op} is a step; accepted are the operators on whole sequences")

    @functools.wraps(operator)
    def distributed(*args: Any, **named: Any) -> tuple[Any, Any]:
        options, operands = _checked(operator, found, False, args, named)
        if isinstance(operands.packing, Sequences):
            raise ValueError(
                f"{found.name}: cu_seqlens along {axis!r}; accepted is None, and segment_ids"
            )
        return found.results(*_compute(found, options, operands, False, axis))

    return cast(Fn, distributed)


def _find(function: Any) -> tuple[Operator, bool]:
    """The operator of a public function, and whether the function is its step."""
    if (found := PUBLIC.get(function)) is None:
        accepted = ", ".join(x.__name__ for x in PUBLIC)
        raise TypeError(f"operator is {function!r}; accepted are {accepted}")
    return found, function.__name__ != found.name


def _checked(
    function: Callable[..., Any],
    operator: Operator,
    token: bool,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
) -> tuple[Options, Forward]:
    """The options and the operands of a call of a public function."""
    bound = inspect.signature(function).bind(*args, **named)
    bound.apply_defaults()
    given = bound.arguments
    inputs = {name: given[name] for name in operator.signature.inputs}
    state = given["state" if token else "initial_state"]
    packing = (given.get(name) for name in ("segment_ids", "cu_seqlens", "active"))
    choices = (given.get(name) for name in ("decay", "precision", "implementation", "scale"))
    options = operator.options(*choices, token=token)
    return options, operator.operands(inputs, state, *packing, token=token)


def _compute(
    operator: Operator, options: Options, operands: Forward, token: bool, axis: Any
) -> YAndState:
    """`y` and the state, inside a `shard_map` that may distribute a sequence along `axis`."""
    if axis is None:
        return operator.compute(options, operands, token=token)
    return over_devices.run(operator, options, axis, operator.prepared(operands, axis=axis))


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
