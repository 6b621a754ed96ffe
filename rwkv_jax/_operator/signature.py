"""What distinguishes one operator from another before any arithmetic: names, axes and forms."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from rwkv_jax._operator.call import (
    Active,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Options,
    Packing,
    Result,
    SegmentIds,
    Sequences,
)

Axes = dict[str, str]


@dataclass(frozen=True, eq=False)
class Signature:
    """The names and axes of an operator's operands.

    name: the operator's, such as "wkv7".
    inputs: the axes of each input, in the order of the public function. An input without the axis B
      is a parameter that the whole batch shares. H is a multiple of G.
    y: the input whose axes and dtype the output has.
    state: the axes of each part of the state.
    decays: the forms in which the operator takes `w`, last that of the official models; none if it
      has no such option.
    identity_token: the inputs of a token that changes no state, bit for bit: a number for each form
      of decay, and 0 for inputs that are not named. None if there are no such inputs.
    state_type: makes the state that callers see of its parts, where there are several.
    empty: the number that a part of the state holds before any token, where that is not 0.
    per_head: parameters [H, K] that callers may give as [H, 1]. Inputs with T are not among them.
    float32_checkpoints: whether saved states are float32 whatever the dtype of the inputs.
    float32: inputs that may be float32 whatever the dtype of the others.
    """

    name: str
    inputs: Mapping[str, str]
    y: str
    state: Mapping[str, str]
    decays: tuple[str, ...]
    identity_token: Mapping[str, Mapping[str, float]] | None = None
    state_type: Callable[..., Any] | None = None
    empty: Mapping[str, float] = field(default_factory=dict)
    per_head: frozenset[str] = frozenset()
    float32_checkpoints: bool = False
    float32: frozenset[str] = frozenset()

    @functools.cached_property
    def per_token(self) -> tuple[str, ...]:
        """The inputs that each token has."""
        return tuple(name for name, axes in self.inputs.items() if "T" in axes)

    @functools.cached_property
    def shared(self) -> tuple[str, ...]:
        """The inputs that all tokens share."""
        return tuple(name for name in self.inputs if name not in self.per_token)

    @functools.cached_property
    def rows(self) -> Axes:
        """The axes of the inputs as implementations get them: parameters once for each row, in
        float32, so that they are mapped and sharded like everything else and their gradients
        summed in float32."""
        return {name: _per_row(axes) for name, axes in self.inputs.items()}

    @functools.cached_property
    def tokens(self) -> Axes:
        """The axes of the inputs of one token, as callers give them."""
        return {name: axes.replace("T", "") for name, axes in self.inputs.items()}

    def part(self, part: str, *, token: bool) -> str:
        """The name by which messages call a part of the state that callers give."""
        return part if token else f"initial_{part}"

    def arguments(self, *, token: bool = False, sequences: bool = False) -> Axes:
        """The array arguments of callers and their axes, the parts of the state last: those of
        whole sequences, of one token, or of `sequences` in a row, which have S states."""
        letter = "S" if sequences else "B"
        state = {self.part(x, token=token): y for x, y in self.state.items()}
        state = {name: axes.replace("B", letter) for name, axes in state.items()}
        return self.given_inputs(token=token) | state

    def given_inputs(self, *, token: bool) -> Axes:
        """The axes of checked inputs: of whole sequences or of one token."""
        return dict(self.tokens if token else self.inputs)

    def given_axes(self, operands: Forward, *, token: bool) -> Forward[str]:
        """The axes of the operands of a checked call, before parameters stand once for each row."""
        packings = {SegmentIds: SegmentIds("BT"), Sequences: Sequences("Z"), Active: Active("B")}
        packing: Any = packings.get(type(operands.packing))
        state = self.given_state(operands.packing) if operands.state else {}
        return Forward(self.given_inputs(token=token), state, packing)

    def given_state(self, packing: Packing) -> Axes:
        """The axes of a state as callers give and get it."""
        letter = "S" if isinstance(packing, Sequences) else "B"
        return {part: axes.replace("B", letter) for part, axes in self.state.items()}

    def sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """The size of each axis of the inputs, given as callers or as implementations have them, of
        whole sequences or of one token."""
        token = len(inputs[self.y].shape) < len(self.inputs[self.y])
        sizes: dict[str, int] = {}
        for name, axes in self.given_inputs(token=token).items():
            shape = inputs[name].shape
            sizes |= zip(_per_row(axes) if len(shape) > len(axes) else axes, shape, strict=True)
        return sizes

    def row_sizes(self, inputs: Mapping[str, Any]) -> tuple[int, ...]:
        """B and T, or B alone."""
        sizes = self.sizes(inputs)
        return tuple(sizes[letter] for letter in "BT" if letter in sizes)

    def states_dtype(self, options: Options, inputs: Mapping[str, Any]) -> Any:
        """The dtype of saved states. For 16-bit inputs float32 states would take as much memory as
        two inputs with K = 64, four with K = 128; rounding them costs no more than the rounding of
        an input did."""
        rounded = inputs[self.y].dtype != jnp.float32 and not options.exact
        return jnp.bfloat16 if rounded and not self.float32_checkpoints else jnp.float32

    def empty_state(self, sizes: Mapping[str, int]) -> Arrays:
        """The state before any token."""
        return {
            part: jnp.full([sizes[x] for x in axes], self.empty.get(part, 0.0), jnp.float32)
            for part, axes in self.state.items()
        }

    def forward_axes(self, packing: Packing) -> Forward[str]:
        return Forward(dict(self.rows), self._states(packing), _axes_of_packing(packing))

    def result_axes(self, packing: Packing, options: Options) -> Result[str]:
        saved = self._saved if options.save else {}
        return Result(self.inputs[self.y], self._states(packing), dict(saved))

    def backward_axes(self, packing: Packing) -> Backward[str]:
        return Backward(
            dict(self.rows),
            dict(self._saved),
            self.inputs[self.y],
            self._states(packing),
            _axes_of_packing(packing),
        )

    def gradient_axes(self, packing: Packing) -> Gradients[str]:
        return Gradients(dict(self.rows), self._states(packing))

    def step_axes(self) -> tuple[Forward[str], Result[str]]:
        inputs = {name: _per_row(axes) for name, axes in self.tokens.items()}
        return Forward(inputs, dict(self.state)), Result(inputs[self.y], dict(self.state), {})

    def _states(self, packing: Packing) -> Axes:
        behind = "BS" if isinstance(packing, Sequences) else "B"
        return {part: axes.replace("B", behind) for part, axes in self.state.items()}

    @functools.cached_property
    def _saved(self) -> Axes:
        return {part: axes.replace("B", "BN") for part, axes in self.state.items()}


def _per_row(axes: str) -> str:
    return axes if "B" in axes else f"B{axes}"


def _axes_of_packing(packing: Packing) -> Any:
    return {Marks: Marks("BT"), Sequences: Sequences("BZ")}.get(type(packing))
