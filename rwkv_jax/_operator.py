"""An operator between its checks and its implementations: the calls that all implementations have,
and the derivatives of a sequence and of a token.

Names and axes are those of the whole sequence. An operand without the axis B is a parameter that
the whole batch shares. Implementations get it once for each sequence, in float32, and give a
gradient for each, so that it is mapped and sharded like everything else and summed in float32.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _dispatch
from rwkv_jax._dispatch import Options, Stage
from rwkv_jax._partition import alike, repeated


@dataclass(frozen=True, eq=False)
class Operator:
    name: str
    inputs: Mapping[str, str]
    """The axes of each; those of `y` are those of `v`."""
    state: Mapping[str, str]
    decays: Sequence[str]
    implementations: Mapping[str, Any]

    @functools.cached_property
    def arguments(self) -> dict[str, str]:
        """The axes of what a caller gives."""
        return {**self.inputs, **self._states("initial_{}")}

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
    def step(self) -> Stage:
        operands = _batched(self.step_arguments)
        results = {"y": operands["v"], **self.state}
        return Stage(f"{self.name}_step", "step", operands, results, self.implementations)

    def options(self, stage: Stage, *, decay: Any, precision: Any, implementation: Any) -> Options:
        return _dispatch.options(
            stage,
            decay=decay,
            precision=precision,
            implementation=implementation,
            decays=self.decays,
        )

    def over_sequence(self, options: Options, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        """`y` and the final state; a state that is not among the arrays starts as zeros."""
        sizes = {
            letter: size
            for name, axes in self.inputs.items()
            for letter, size in zip(axes, arrays[name].shape, strict=True)
        }
        zeros = {
            name: jnp.zeros([sizes[letter] for letter in axes])
            for name, axes in self._states("initial_{}").items()
            if name not in arrays
        }
        operands = _prepared(self.arguments, {**arrays, **zeros})
        if options.implementation == "reference":
            return _dispatch.call(self.reference, options, *operands)
        return _sequence(self, options, *operands)

    def over_token(self, options: Options, arrays: Mapping[str, Array]) -> tuple[Array, ...]:
        """`y` and the next state."""
        operands = _prepared(self.step_arguments, arrays)
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


def _prepared(axes: Mapping[str, str], arrays: Mapping[str, Array]) -> tuple[Array, ...]:
    """The operands of a stage, on the same mesh axes. Parameters are so before they are repeated:
    their gradients are summed over the batch before they are summed over devices."""
    operands = dict(zip(axes, alike(axes.values(), *(arrays[name] for name in axes)), strict=True))
    batched = next(name for name in axes if "B" in axes[name])
    for name, x in operands.items():
        if "B" not in axes[name]:
            operands[name] = repeated(
                x.astype(jnp.float32), axes[name], operands[batched], axes[batched]
            )
    return tuple(operands.values())


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(operator: Operator, options: Options, *operands: Array) -> tuple[Array, ...]:
    results = _dispatch.call(operator.forward, options, *operands)
    return tuple(results[: 1 + len(operator.state)])


def _sequence_forward(
    operator: Operator, options: Options, *operands: Array
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    saving = dataclasses.replace(options, save=True)
    results = _dispatch.call(operator.forward, saving, *operands)
    count = 1 + len(operator.state)
    residuals = (*operands[: len(operator.inputs)], *results[count:])
    return tuple(results[:count]), residuals


def _sequence_backward(
    operator: Operator,
    options: Options,
    residuals: tuple[Array, ...],
    cotangents: tuple[Array, ...],
) -> tuple[Array, ...]:
    return _dispatch.call(operator.backward, options, *residuals, *cotangents)


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
