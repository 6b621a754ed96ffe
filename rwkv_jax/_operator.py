"""An operator between its checks and its implementations: the calls that all implementations have,
and the derivatives of a sequence and of a token.

Names and axes are those of the whole sequence. An operand without the axis B is a parameter that
the whole batch shares. Implementations get it once for each sequence, in float32, and give a
gradient for each, so that it is mapped and sharded like everything else and summed in float32.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rwkv_jax import _check, _dispatch, _over_devices, _packing, _sequences, _slots
from rwkv_jax._dispatch import Differentiated, Options, Stage
from rwkv_jax._partition import alike, check_whole, repeated


@dataclass(frozen=True, eq=False)
class Operator:
    name: str
    inputs: Mapping[str, str]
    """The axes of each; those of `y` are those of `v`."""
    state: Mapping[str, str]
    decays: Sequence[str]
    implementations: Mapping[str, Any]
    segments: Any
    """A module: what a run of tokens does to a state."""
    state_type: Callable[..., Any] | None = None
    """What makes the state that callers see of its parts, where there are several."""
    empty: Mapping[str, float] = field(default_factory=dict)
    """The parts of a state without tokens that are not 0."""
    per_head: frozenset[str] = frozenset()
    """The inputs [H, K] that callers may give as [H, 1]."""

    @functools.cached_property
    def arguments(self) -> dict[str, str]:
        """The axes of what a caller gives."""
        return {**self.inputs, **self._states("initial_{}")}

    @functools.cached_property
    def arguments_of_sequences(self) -> dict[str, str]:
        """The same of sequences in one row, with S states."""
        return {
            n: x if n in self.inputs else x.replace("B", "S") for n, x in self.arguments.items()
        }

    @functools.cached_property
    def step_arguments(self) -> dict[str, str]:
        tokens = {name: axes.replace("T", "") for name, axes in self.inputs.items()}
        return {**tokens, **self.state}

    @functools.cached_property
    def forward(self) -> Stage:
        results = {"y": self.inputs["v"], **self._states("final_{}"), **self._saved}
        return Stage(self.name, "forward", _batched(self.arguments), results, self.implementations)

    @functools.cached_property
    def backward(self) -> Stage:
        cotangents = {"dy": self.inputs["v"], **self._states("dfinal_{}")}
        operands = {**_batched(self.inputs), **self._saved, **cotangents}
        results = {f"d{name}": axes for name, axes in self.forward.operands.items()}
        return Stage(self.name, "backward", operands, results, self.implementations)

    @functools.cached_property
    def reference(self) -> Stage:
        """The forward pass of the reference, which JAX differentiates."""
        results = {"y": self.inputs["v"], **self._states("final_{}")}
        return dataclasses.replace(self.forward, results=results)

    @functools.cached_property
    def differentiated(self) -> Differentiated:
        counts = len(self.inputs), len(self.state)
        return Differentiated(self.forward, self.backward, self.reference, *counts)

    @functools.cached_property
    def of_sequences(self) -> Differentiated:
        """The same of sequences of different lengths in a row, with a state each."""
        return _sequences.differentiated(self)

    @functools.cached_property
    def summary(self) -> Stage:
        """What all tokens do to a state, as a map of which `segments` knows the use."""
        return dataclasses.replace(
            self.forward,
            name="summary",
            operands=_batched(self.inputs),
            results=self.segments.AXES,
            otherwise=("forward", self.segments.summarize),
        )

    @functools.cached_property
    def reverse_summary(self) -> Stage:
        """The gradient of the initial state alone."""
        count = len(self.inputs)
        return dataclasses.replace(
            self.backward,
            name="reverse_summary",
            results=dict(list(self.backward.results.items())[count:]),
            otherwise=("backward", lambda backward, *operands: backward(*operands)[count:]),
        )

    @functools.cached_property
    def step(self) -> Stage:
        operands = _batched(self.step_arguments)
        results = {"y": operands["v"], **self.state}
        return Stage(f"{self.name}_step", "step", operands, results, self.implementations)

    def sequence(self, given: Mapping[str, Any], **options: Any) -> tuple[Array, Any]:
        """The public function on whole sequences, of its arguments and options by name."""
        given = dict(given)
        chosen = self.options(self.forward, **options)
        ids, cu = given.pop("segment_ids"), given.pop("cu_seqlens")
        if cu is not None:
            self.check_without_ids(ids)
            states = tuple(n - 1 for n in np.shape(cu)[:1])
            given, pool = self._pooled(self.name, given, "initial_state", states)
            arrays, cu = self.checked_sequences(given, cu)
            results = self.over_sequences(chosen, arrays, cu)
            if pool is not None:
                owner = _sequences.owners(cu, arrays["v"].shape[1])
                active = jnp.pad(pool.active(), (0, 1))[owner][None]
                results = pool.after(results[0], results[1:], active)
            return self.packed(results)
        states = self._batch(self.arguments, given)
        given, pool = self._pooled(self.name, given, "initial_state", states)
        arrays = self.checked(self.name, self.arguments, given, "initial_state")
        marks = None if ids is None else _packing.marks(self.checked_ids(ids, arrays))
        results = self.over_sequence(chosen, arrays, marks)
        return self.packed(self._put_back(pool, results))

    def token(self, given: Mapping[str, Any], **options: Any) -> tuple[Array, Any]:
        """The public function on one token."""
        arguments, name = self.step_arguments, self.step.op
        given, pool = self._pooled(name, given, "state", self._batch(arguments, given))
        arrays = self.checked(name, arguments, given, "state")
        results = self.over_token(self.options(self.step, **options), arrays)
        return self.packed(self._put_back(pool, results))

    def _batch(self, arguments: Mapping[str, str], given: Mapping[str, Any]) -> tuple[int, ...]:
        """[B] of what may be wrong yet."""
        return np.shape(given[next(n for n in arguments if "B" in arguments[n])])[:1]

    def _pooled(
        self, name: str, given: Mapping[str, Any], state: str, states: tuple[int, ...]
    ) -> tuple[dict[str, Any], _slots.Pool | None]:
        """What was given, and where there are slots, one for each of so many states, the pool,
        with its rows in place of it."""
        given = dict(given)
        if (slots := given.pop("slots")) is None:
            return given, None
        if given[state] is None:
            raise ValueError(f"{name}: {state} is None; accepted with slots is a pool of states")
        parts = self._parts(f"{name}: {state}", given[state])
        names = [f"{state}.{part}" for part in self.state] if self.state_type else [state]
        axes = [x.replace("B", "P") for x in self.state.values()]
        checked = _check.arrays(
            name, dict(zip(names, axes, strict=True)), dict(zip(names, parts, strict=True)), names
        )
        parts = list(checked.values())
        pool = _slots.Pool(parts, _slots.checked(name, slots, states, len(parts[0])))
        rows = pool.rows()
        return given | {state: self.state_type(*rows) if self.state_type else rows[0]}, pool

    def _put_back(self, pool: _slots.Pool | None, results: tuple[Array, ...]) -> tuple[Array, ...]:
        return results if pool is None else pool.after(results[0], results[1:], pool.active())

    def checked(
        self, name: str, arguments: Mapping[str, str], given: Mapping[str, Any], state: str
    ) -> dict[str, Array]:
        """The arrays by name, the parts of a state among them, if one was given."""
        arrays = {n: self._whole(n, x, given) for n, x in given.items() if n != state}
        parts = list(arguments)[len(self.inputs) :]
        if given[state] is not None or state == "state":
            arrays |= zip(parts, self._parts(f"{name}: {state}", given[state]), strict=True)
        return _check.arrays(name, arguments, arrays, states=parts)

    def checked_ids(self, ids: Any, arrays: Mapping[str, Array]) -> Array:
        """`segment_ids` [B, T], with T whole on an Explicit mesh."""
        ids = _packing.checked(self.name, ids, arrays["v"].shape[:2])
        return alike(["BT"], ids)[0]

    def check_without_ids(self, ids: Any) -> None:
        if ids is not None:
            raise ValueError(
                f"{self.name}: segment_ids with cu_seqlens; accepted is None for one of them"
            )

    def checked_sequences(
        self, given: Mapping[str, Any], cu: Any
    ) -> tuple[dict[str, Array], Array]:
        """The arrays by name, with a state for each sequence of the one row, and `cu_seqlens`."""
        arguments = self.arguments_of_sequences
        arrays = self.checked(self.name, arguments, given, "initial_state")
        cu = _sequences.checked(self.name, cu, *arrays["v"].shape[:2])
        for name, axes in arguments.items():
            if "S" in axes and name in arrays and len(arrays[name]) != len(cu) - 1:
                raise ValueError(
                    f"{self.name}: {name} has shape {arrays[name].shape}, so S = "
                    f"{len(arrays[name])}, where cu_seqlens has S + 1 = {len(cu)}"
                )
        return arrays, cu

    def _whole(self, name: str, x: Any, given: Mapping[str, Any]) -> Any:
        """A parameter of each head as one of each channel; anything else as it is, to be refused
        where it is wrong."""
        one = isinstance(x, jax.Array | np.ndarray) and x.ndim == 2 and x.shape[1] == 1
        if name not in self.per_head or not one:
            return x
        return jnp.broadcast_to(x, (x.shape[0], *np.shape(given["r"])[-1:]))

    def _parts(self, name: str, state: Any) -> Sequence[Any]:
        if self.state_type is None:
            return [state]
        if not (isinstance(state, tuple) and len(state) == len(self.state)):
            accepted = getattr(self.state_type, "__name__", self.state_type)
            raise TypeError(f"{name} is a {type(state).__name__}; accepted is a {accepted}")
        return state

    def packed(self, results: Sequence[Any]) -> tuple[Any, Any]:
        """`y` and the state as callers see them."""
        y, *state = results
        return y, self.state_type(*state) if self.state_type else state[0]

    def options(self, stage: Stage, *, decay: Any, precision: Any, implementation: Any) -> Options:
        return _dispatch.options(
            stage,
            decay=decay,
            precision=precision,
            implementation=implementation,
            decays=self.decays,
        )

    def over_sequence(
        self,
        options: Options,
        arrays: Mapping[str, Array],
        marks: Array | None = None,
        axis: Any = None,
    ) -> tuple[Array, ...]:
        """`y` and the final state. A state that is not among the arrays starts without tokens.
        Inside `shard_map` a sequence may be distributed along a mesh axis."""
        axes, given = self.arguments, self._started(arrays)
        if marks is not None:
            axes, given = {**axes, "marks": "BT"}, {**given, "marks": marks}
        operands = _prepared(self.name, axes, given, axis)
        if axis is not None:
            return _over_devices.run(self, options, axis, *operands)
        if options.implementation == "reference":
            return _dispatch.call(self.reference.of(operands), options, *operands)
        return _sequence(self.differentiated, options, *operands)

    def over_sequences(
        self, options: Options, arrays: Mapping[str, Array], cu: Array
    ) -> tuple[Array, ...]:
        """`y` and the final states of sequences one after another in a single row."""
        given = self._started(arrays, B=len(cu) - 1)
        states = self._states("initial_{}")
        if given["v"].size == 0 or len(cu) == 1:
            return jnp.zeros_like(given["v"]), *(given[name] for name in states)
        stages = self.of_sequences
        axes = {**_sequences.several(self.arguments), "cu_seqlens": "BZ"}
        given |= {n: given[n][None] for n in states} | {"cu_seqlens": cu[None]}
        operands = _prepared(self.name, axes, given)
        results: tuple[Array, ...] = (
            _dispatch.call(stages.reference, options, *operands)
            if options.implementation == "reference"
            else _sequence(stages, options, *operands)
        )
        y, *after = results
        return y, *(jnp.squeeze(x, 0) for x in after)

    def _started(self, arrays: Mapping[str, Array], **sizes: int) -> dict[str, Array]:
        """The arrays, and for states that are not among them those without tokens. `sizes` says
        which axes of a state have not the size that they have in the inputs."""
        of_inputs = {
            letter: size
            for name, axes in self.inputs.items()
            for letter, size in zip(axes, arrays[name].shape, strict=True)
        }
        sizes = of_inputs | sizes
        states = dict(zip(self._states("initial_{}"), self.state, strict=True))
        start = {
            name: jnp.full(
                [sizes[x] for x in self.state[part]], self.empty.get(part, 0.0), jnp.float32
            )
            for name, part in states.items()
            if name not in arrays
        }
        return {**arrays, **start}

    def over_token(self, options: Options, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        """`y` and the next state."""
        operands = _prepared(self.step.op, self.step_arguments, arrays)
        if options.implementation == "reference":
            return _dispatch.call(self.step, options, *operands)
        return _token(self, options, *operands)

    def _states(self, form: str) -> dict[str, str]:
        return {form.format(name): axes for name, axes in self.state.items()}

    @functools.cached_property
    def _saved(self) -> dict[str, str]:
        """The states at chunk boundaries."""
        return {f"{name}s": axes.replace("B", "BN") for name, axes in self.state.items()}


def _batched(axes: Mapping[str, str]) -> dict[str, str]:
    return {name: x if "B" in x else f"B{x}" for name, x in axes.items()}


def _prepared(
    op: str, axes: Mapping[str, str], arrays: Mapping[str, Array], axis: Any = None
) -> tuple[Array, ...]:
    """The operands of a stage, on the same mesh axes. Parameters are so before they are repeated:
    their gradients are summed over the batch before they are summed over devices."""
    ordered = [arrays[name] for name in axes]
    check_whole(op, axes, ordered)
    operands = dict(zip(axes, alike(axes.values(), *ordered, axis=axis), strict=True))
    batched = next(name for name in axes if "B" in axes[name])
    for name, x in operands.items():
        if "B" not in axes[name]:
            operands[name] = repeated(
                x.astype(jnp.float32), axes[name], operands[batched], axes[batched]
            )
    return tuple(operands.values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(stages: Differentiated, options: Options, *operands: Array) -> tuple[Array, ...]:
    results = _dispatch.call(stages.forward.of(operands), options, *operands)
    return tuple(results[: 1 + stages.states])


def _sequence_forward(
    stages: Differentiated, options: Options, *operands: Array
) -> tuple[tuple[Array, ...], tuple[tuple[Array, ...], tuple[Array, ...]]]:
    saving = dataclasses.replace(options, save=True)
    results = _dispatch.call(stages.forward.of(operands), saving, *operands)
    count = 1 + stages.states
    inputs, others = operands[: stages.inputs], operands[stages.inputs + stages.states :]
    return tuple(results[:count]), ((*inputs, *results[count:]), others)


def _sequence_backward(
    stages: Differentiated,
    options: Options,
    residuals: tuple[tuple[Array, ...], tuple[Array, ...]],
    cotangents: tuple[Array, ...],
) -> tuple[Array | None, ...]:
    saved, others = residuals
    operands = *saved, *cotangents, *others
    gradients = _dispatch.call(stages.backward.of(operands), options, *operands)
    return *gradients, *[None] * len(others)


_sequence.defvjp(_sequence_forward, _sequence_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token(operator: Operator, options: Options, *operands: Array) -> tuple[Array, ...]:
    return tuple(_dispatch.call(operator.step, options, *operands))


def _token_forward(
    operator: Operator, options: Options, *operands: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    return _token(operator, options, *operands), operands


def _token_backward(
    operator: Operator, options: Options, operands: tuple[Array, ...], cotangents: tuple[Array, ...]
) -> tuple[Array, ...]:
    """That of a sequence of one token, in which the state is the only saved one."""
    count = len(operator.inputs)
    timed = ["T" in axes for axes in operator.inputs.values()]
    inputs = [x[:, None] if t else x for x, t in zip(operands[:count], timed, strict=True)]
    states = [x[:, None] for x in operands[count:]]
    dy, *dfinal = cotangents
    gradients = _dispatch.call(operator.backward, options, *inputs, *states, dy[:, None], *dfinal)
    return (
        *(x[:, 0] if t else x for x, t in zip(gradients[:count], timed, strict=True)),
        *gradients[count:],
    )


_token.defvjp(_token_forward, _token_backward)
