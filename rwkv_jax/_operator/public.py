"""The public functions of an operator: from what a caller gives to results, and back again.

Each operator writes its two functions and their docstrings itself; `sequence` and `token` are their
bodies, and `public` registers them, so that `rwkv_jax.sharding` and `rwkv_jax.implementations` find
the operator that belongs to a function or a name.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rwkv_jax._devices import sequence as over_devices
from rwkv_jax._operator import check, derivative
from rwkv_jax._operator.call import Arrays, Forward, Marks, Options, SegmentIds, Sequences
from rwkv_jax._operator.dispatch import named
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.partition import alike, check_whole, repeated
from rwkv_jax._packing import segments, sequences, slots
from rwkv_jax._packing.slots import Pool

Fn = TypeVar("Fn", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """A checked call of a public function.

    The operands have the axes that callers know: parameters stand once, offsets of sequences are
    [Z], and the state is empty where none was given. `pool` is the pool that the state is from.
    """

    options: Options
    operands: Forward
    pool: Pool | None = None


@dataclass(frozen=True)
class PublicFunction:
    """A public function of an operator: on whole sequences, or on one token."""

    function: Callable[..., Any]
    operator: Operator
    is_step: bool

    @property
    def name(self) -> str:
        return self.operator.step_name if self.is_step else self.operator.name

    @property
    def arguments(self) -> dict[str, str]:
        """The array arguments and their axes, the parts of the state last."""
        signature = self.operator.signature
        inputs = signature.tokens if self.is_step else signature.inputs
        parts = {self._part(part): axes for part, axes in signature.state.items()}
        return {**inputs, **parts}

    @property
    def state_argument(self) -> str:
        return "state" if self.is_step else "initial_state"

    def _part(self, part: str) -> str:
        """The name by which messages call a part of the state."""
        return part if self.is_step else f"initial_{part}"

    def bind(self, *args: Any, **options: Any) -> Call:
        """The checked call of the function with these arguments."""
        bound = inspect.signature(self.function).bind(*args, **options)
        bound.apply_defaults()
        return self.checked(bound.arguments)

    def checked(self, arguments: Mapping[str, Any]) -> Call:
        """A call from all arguments of the function by name."""
        given = dict(arguments)
        chosen = {name: given.pop(name) for name in ("decay", "precision", "implementation")}
        options = check.options(self.name, self.operator, **chosen)
        ids, offsets = given.pop("segment_ids", None), given.pop("cu_seqlens", None)
        places, state = given.pop("slots"), given.pop(self.state_argument)
        if offsets is not None and ids is not None:
            raise ValueError(
                f"{self.name}: segment_ids with cu_seqlens; accepted is None for one of them"
            )
        inputs = {name: self._whole(name, x, given) for name, x in given.items()}
        parts, pool = self._parts(state), None
        if places is not None:
            pool = self._pool(places, parts, self._states_given(given, offsets))
            parts = {self._part(part): x for part, x in pool.rows().items()}
        axes = self.arguments if offsets is None else self.arguments_of_sequences
        arrays = check.arrays(self.name, axes, inputs | parts, states=list(axes)[len(inputs) :])
        packing = None
        if offsets is not None:
            packing = Sequences(self._checked_offsets(offsets, arrays))
        elif ids is not None:
            packing = SegmentIds(
                segments.checked(self.name, ids, *self.operator.signature.row_sizes(arrays))
            )
        signature = self.operator.signature
        operands = Forward(
            {name: arrays[name] for name in signature.inputs},
            {part: arrays[self._part(part)] for part in signature.state if parts},
            packing,
        )
        return Call(options, operands, pool)

    @property
    def arguments_of_sequences(self) -> dict[str, str]:
        """The arguments of sequences in a row, with S states."""
        inputs = self.operator.signature.inputs
        return {n: x if n in inputs else x.replace("B", "S") for n, x in self.arguments.items()}

    def _checked_offsets(self, offsets: Any, arrays: Mapping[str, Array]) -> Array:
        offsets = sequences.checked(self.name, offsets, *self.operator.signature.row_sizes(arrays))
        for name, axes in self.arguments_of_sequences.items():
            if "S" in axes and name in arrays and len(arrays[name]) != len(offsets) - 1:
                raise ValueError(
                    f"{self.name}: {name} has shape {arrays[name].shape}, so S = "
                    f"{len(arrays[name])}, where cu_seqlens has S + 1 = {len(offsets)}"
                )
        return offsets

    def _whole(self, name: str, x: Any, given: Mapping[str, Any]) -> Any:
        """A parameter of each head as one of each channel. Whatever is wrong stays as it is, for
        the checks to refuse."""
        signature = self.operator.signature
        one = isinstance(x, jax.Array | np.ndarray) and x.ndim == 2 and x.shape[1] == 1
        if name not in signature.per_head or not one:
            return x
        full = next(n for n, axes in signature.inputs.items() if "B" in axes and "K" in axes)
        return jnp.broadcast_to(x, (x.shape[0], *np.shape(given[full])[-1:]))

    def _parts(self, state: Any) -> dict[str, Any]:
        """The parts of a state by the names of messages; none if a sequence starts without one."""
        signature = self.operator.signature
        names = [self._part(part) for part in signature.state]
        if state is None and not self.is_step:
            return {}
        if signature.state_type is None:
            return {names[0]: state}
        if not (isinstance(state, tuple) and len(state) == len(names)):
            accepted = getattr(signature.state_type, "__name__", signature.state_type)
            raise TypeError(
                f"{self.name}: {self.state_argument} is a {type(state).__name__}; "
                f"accepted is a {accepted}"
            )
        return dict(zip(names, state, strict=True))

    def _states_given(self, given: Mapping[str, Any], offsets: Any) -> tuple[int, ...]:
        """The shape that slots must have. The arguments are not checked yet."""
        if offsets is not None:
            return tuple(n - 1 for n in np.shape(offsets)[:1])
        batched = next(name for name, axes in self.arguments.items() if "B" in axes)
        return np.shape(given[batched])[:1]

    def _pool(self, places: Any, parts: Mapping[str, Any], states: tuple[int, ...]) -> Pool:
        name, signature = self.state_argument, self.operator.signature
        if not parts or any(x is None for x in parts.values()):
            raise ValueError(
                f"{self.name}: {name} is None; accepted with slots is a pool of states"
            )
        # Messages call a part of a pool as callers do: an attribute of the argument.
        several = signature.state_type is not None
        names = [f"{name}.{part}" if several else name for part in signature.state]
        axes = [axes.replace("B", "P") for axes in signature.state.values()]
        arrays = check.arrays(
            self.name,
            dict(zip(names, axes, strict=True)),
            dict(zip(names, parts.values(), strict=True)),
            states=names,
        )
        pool = dict(zip(signature.state, arrays.values(), strict=True))
        size = len(next(iter(pool.values())))
        return Pool(pool, slots.checked(self.name, places, states, size))

    def axes(self, operands: Forward) -> Forward[str]:
        """The axes of the operands of a checked call."""
        signature = self.operator.signature
        inputs = signature.tokens if self.is_step else dict(signature.inputs)
        packing = None
        match operands.packing:
            case SegmentIds():
                packing = SegmentIds("BT")
            case Sequences():
                packing = Sequences("Z")
        state = self.result_axes(operands)[1] if operands.state else {}
        return Forward(inputs, state, packing)

    def result_axes(self, operands: Forward) -> tuple[str, dict[str, str]]:
        """The axes of `y` and of the parts of the state."""
        signature = self.operator.signature
        letter = "S" if isinstance(operands.packing, Sequences) else "B"
        state = {part: axes.replace("B", letter) for part, axes in signature.state.items()}
        return (signature.tokens if self.is_step else signature.inputs)[signature.y], state

    def compute(
        self, options: Options, operands: Forward, axis: Any = None
    ) -> tuple[Array, Arrays]:
        """`y` and the state of a checked call. Inside `shard_map` a sequence may be distributed
        along a mesh axis."""
        operator, packing = self.operator, operands.packing
        if self.is_step:
            operands = _prepared(operator, self.name, operands, token=True)
            return derivative.token(operator, options, operands)
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

    def results(self, y: Any, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """`y` and the state as callers see them."""
        signature = self.operator.signature
        parts = [state[part] for part in signature.state]
        return y, signature.state_type(*parts) if signature.state_type else parts[0]

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
        _REGISTERED[function] = PublicFunction(function, operator, is_step)
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
    leaves, structure = jax.tree.flatten(operands)
    letters = jax.tree.leaves(Forward(inputs, axes.state, axes.packing))
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
