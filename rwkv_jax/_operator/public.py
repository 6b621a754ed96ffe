"""The public functions of operators.

An operator writes the signatures and the docstrings of its two functions itself. `public` registers
them, so that `rwkv_jax.sharding` and `rwkv_jax.implementations` find the operator that belongs to a
function or a name, and `run` is their body.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._devices import sequence as over_devices
from rwkv_jax._operator import derivative
from rwkv_jax._operator.arguments import Arguments, Call
from rwkv_jax._operator.call import Arrays, Forward, Marks, Options, SegmentIds, Sequences
from rwkv_jax._operator.dispatch import named
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.partition import alike, check_whole, repeated
from rwkv_jax._packing import segments, sequences

Fn = TypeVar("Fn", bound=Callable[..., Any])


@dataclass(frozen=True)
class PublicFunction(Arguments):
    """A public function of an operator."""

    function: Callable[..., Any]

    def bind(self, *args: Any, **options: Any) -> Call:
        """The checked call of the function with these arguments."""
        bound = inspect.signature(self.function).bind(*args, **options)
        bound.apply_defaults()
        return self.checked(bound.arguments)

    def compute(
        self, options: Options, operands: Forward, axis: Any = None
    ) -> tuple[Array, Arrays]:
        """`y` and the state of a checked call. Inside `shard_map` a sequence may be distributed
        along a mesh axis."""
        operator, packing = self.operator, operands.packing
        if self.is_step:
            operands = _prepared(operator, self.name, operands, token=True)
            return _token(operator, options, operands)
        if isinstance(packing, Sequences):
            return _sequences_in_a_row(operator, options, operands, packing)
        operands = _started(operator, operands)
        if isinstance(packing, SegmentIds):
            (ids,) = alike(["BT"], packing.ids)
            found = segments.marks(ids) if axis is None else segments.over_devices(ids, axis)
            operands = Forward(operands.inputs, operands.state, Marks(found))
        operands = _prepared(operator, self.name, operands, axis=axis)
        if axis is not None:
            return over_devices.run(operator, options, axis, operands)
        return derivative.sequence(operator, options, operands)

    def __call__(self, arguments: Mapping[str, Any]) -> tuple[Array, Any]:
        call = self.checked(arguments)
        y, state = self.compute(call.options, call.operands)
        if (pool := call.pool) is None:
            return self.results(y, state)
        active, packing = pool.active(), call.operands.packing
        if isinstance(packing, Sequences):
            owner = sequences.owners(packing.offsets, y.shape[1])
            active = jnp.pad(active, (0, 1))[owner][None]
        return self.results(*pool.after(y, state, active))


_REGISTERED: dict[Callable[..., Any], PublicFunction] = {}


def public(operator: Operator, *, is_step: bool = False) -> Callable[[Fn], Fn]:
    """Registers a public function of an operator. Its parameters are named as the operands of the
    operator, `initial_state` or `state`, and as the options of `wkv7` or `wkv7_step`."""

    def register(function: Fn) -> Fn:
        _REGISTERED[function] = PublicFunction(operator, is_step, function)
        return function

    return register


def find(function: Any) -> PublicFunction:
    """The registered function.

    Raises:
      TypeError: there is none.
    """
    if found := _REGISTERED.get(function):
        return found
    accepted = ", ".join(f.name for f in _REGISTERED.values())
    raise TypeError(f"operator is {function!r}; accepted are {accepted}")


def registered() -> Sequence[PublicFunction]:
    return tuple(_REGISTERED.values())


def run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> tuple[Array, Any]:
    """The body of a public function, from its arguments by name."""
    return _REGISTERED[function](arguments)


def _started(operator: Operator, operands: Forward, **sizes: int) -> Forward:
    """The operands, with the state before any token if none is given. `sizes` are those of axes
    that the state does not share with the inputs."""
    if operands.state:
        return operands
    sizes = operator.signature.sizes(operands.inputs) | sizes
    return Forward(operands.inputs, operator.signature.empty_state(sizes), operands.packing)


def _prepared(
    operator: Operator, op: str, operands: Forward, *, token: bool = False, axis: Any = None
) -> Forward:
    """The operands of a pass: all on the same mesh axes, and parameters once for each row.

    Parameters are brought to the mesh axes before they are repeated: their gradients are summed
    over the batch before they are summed over devices.
    """
    signature = operator.signature
    inputs = signature.tokens if token else dict(signature.inputs)
    axes = signature.forward_axes(operands.packing)
    packing = SegmentIds("B") if token and operands.packing is not None else axes.packing
    leaves, structure = jax.tree.flatten(operands)
    letters = jax.tree.leaves(Forward(inputs, axes.state, packing))
    names = [name for name, _ in named(operands)]
    check_whole(op, list(zip(names, letters, strict=True)), leaves)
    leaves = list(alike(letters, *leaves, axis=axis))
    batched = next(i for i, x in enumerate(letters) if "B" in x)
    for i, x in enumerate(letters):
        if "B" not in x:
            leaves[i] = repeated(
                leaves[i].astype(jnp.float32), x, leaves[batched], letters[batched]
            )
    return jax.tree.unflatten(structure, leaves)


def _token(operator: Operator, options: Options, operands: Forward) -> tuple[Array, Arrays]:
    """`y` and the next state of one token of each row. Where that is padding, the operator gets a
    token that changes no state, if there is one, so that nothing has to go over the states again.
    """
    if not isinstance(operands.packing, SegmentIds):
        return derivative.token(operator, options, operands)
    ids, idle = operands.packing.ids, operator.signature.idle

    def selected(x: Array, otherwise: Array | float) -> Array:
        there = jnp.expand_dims(ids != 0, tuple(range(1, x.ndim)))
        return jnp.where(there, x, otherwise)

    numbers = {name: of_form[options.decay] for name, of_form in (idle or {}).items()}
    inputs = {name: selected(x, numbers.get(name, 0.0)) for name, x in operands.inputs.items()}
    y, after = derivative.token(operator, options, Forward(inputs, operands.state))
    if idle is None:
        after = {part: selected(x, operands.state[part]) for part, x in after.items()}
    return selected(y, 0.0), after


def _sequences_in_a_row(
    operator: Operator, options: Options, operands: Forward, packing: Sequences
) -> tuple[Array, Arrays]:
    """`y` and the final states of sequences one after another in a single row."""
    count = len(packing.offsets) - 1
    operands = _started(operator, operands, B=count)
    y = operands.inputs[operator.signature.y]
    if y.size == 0 or count == 0:
        return jnp.zeros_like(y), operands.state
    states = {part: x[None] for part, x in operands.state.items()}
    row = Forward(operands.inputs, states, Sequences(packing.offsets[None]))
    y, states = derivative.sequence(operator, options, _prepared(operator, operator.name, row))
    return y, {part: jnp.squeeze(x, 0) for part, x in states.items()}
