"""An operator: what its public functions call, and what the machinery knows of it.

`Operator.sequence` and `Operator.step` check the arguments, bring the operands to the form in which
implementations take them, and hand them to the derivative, which stands below. Its passes go on in
`dispatch.py`.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from rwkv_jax._operator import arguments, check, dispatch, heads
from rwkv_jax._operator.call import (
    Active,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Options,
    Result,
    SegmentIds,
    Sequences,
)
from rwkv_jax._operator.dispatch import Computation, Pass
from rwkv_jax._operator.implementation import Implementation, Transition
from rwkv_jax._operator.partition import (
    Shards,
    check_heads_unsharded,
    explicit_mesh,
    match_shardings,
    repeated,
    shares_evenly,
)
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import by_chunk, segments

Fn = TypeVar("Fn", bound=Callable[..., Any])

YAndState: TypeAlias = tuple[Array, Arrays]


@dataclass(frozen=True, eq=False)
class Operator(Computation):
    """All that the machinery knows of an operator.

    Every operator has "reference", which JAX differentiates, and may have "xla", "pallas" and
    "ffi". Of one whose import costs time or may fail, `implementations` has the name of the module;
    the module calls it IMPLEMENTATION.
    """

    signature: Signature
    transition: Transition
    implementations: Mapping[str, Implementation | str]
    name: str = dataclasses.field(init=False)

    left_to_jax = ("reference",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.signature.name)

    def public_name(self, *, token: bool) -> str:
        return f"{self.name}_step" if token else self.name

    def title(self, name: Pass) -> str:
        return self.public_name(token=name == "step")

    # What public functions call.

    def sequence(
        self,
        inputs: Mapping[str, Any],
        initial_state: Any,
        segment_ids: Any,
        cu_seqlens: Any,
        decay: Any,
        precision: Any,
        implementation: Any,
        scale: Any = None,
    ) -> tuple[Array, Any]:
        """`y` and the final state of whole sequences, from the arguments of a public function."""
        options = self.options(decay, precision, implementation, scale, token=False)
        operands = self.operands(inputs, initial_state, segment_ids, cu_seqlens, token=False)
        return self.results(*self.compute(options, operands, token=False))

    def step(
        self,
        inputs: Mapping[str, Any],
        state: Any,
        active: Any,
        decay: Any,
        precision: Any,
        implementation: Any,
        scale: Any = None,
    ) -> tuple[Array, Any]:
        """`y` and the next state of one token of each row, likewise."""
        options = self.options(decay, precision, implementation, scale, token=True)
        operands = self.operands(inputs, state, active=active, token=True)
        return self.results(*self.compute(options, operands, token=True))

    def options(
        self, decay: Any, precision: Any, implementation: Any, scale: Any = None, *, token: bool
    ) -> Options:
        op = self.public_name(token=token)
        if implementation is not None:
            check.choice(op, "implementation", implementation, self.implementations)
        decay = check.choice(op, "decay", decay, self.signature.decays or (None,))
        if scale is not None:
            scale = check.real(op, "scale", scale)
        return Options(decay, check.precision_of(op, precision), implementation, scale=scale)

    def operands(
        self,
        inputs: Mapping[str, Any],
        state: Any,
        segment_ids: Any = None,
        cu_seqlens: Any = None,
        active: Any = None,
        *,
        token: bool,
    ) -> Forward:
        """The checked operands of a call, with the axes that callers know."""
        op, packing = self.public_name(token=token), (segment_ids, cu_seqlens, active)
        return arguments.operands(op, self.signature, inputs, state, *packing, token=token)

    def compute(self, options: Options, operands: Forward, *, token: bool) -> YAndState:
        """`y` and the state of a checked call."""
        if token:
            return self._of_tokens(options, self.prepared(operands, token=True))
        if isinstance(operands.packing, Sequences):
            return self._in_a_row(options, operands, operands.packing)
        return self._forward(options)(self.prepared(operands))

    def results(self, y: Any, state: Mapping[str, Any]) -> tuple[Any, Any]:
        """`y` and the state as callers see them."""
        parts, state_type = [state[x] for x in self.signature.state], self.signature.state_type
        return y, state_type(*parts) if state_type else parts[0]

    def started(self, operands: Forward, **sizes: int) -> Forward:
        """The operands, with the state before any token if none is given. `sizes` are those of axes
        that the state does not share with the inputs."""
        if operands.state:
            return operands
        sizes = self.signature.sizes(operands.inputs) | sizes
        return Forward(operands.inputs, self.signature.empty_state(sizes), operands.packing)

    def prepared(self, operands: Forward, *, token: bool = False, axis: Any = None) -> Forward:
        """The operands of a pass, from those of a checked call: all on the same mesh axes, `axis`
        among them, with a state, marks for segments, and parameters once for each row.

        Parameters are brought to the mesh axes before they are repeated: their gradients are summed
        over the batch before they are summed over devices. Heads that are shared are repeated where
        they are too few for a mesh.
        """
        if not token:
            operands = self.started(operands)
            if isinstance(operands.packing, SegmentIds):
                (ids,) = match_shardings(["BT"], operands.packing.ids)
                marks = segments.marks(ids) if axis is None else segments.over_devices(ids, axis)
                operands = dataclasses.replace(operands, packing=Marks(marks))
        axes = self.signature.forward_axes(operands.packing)
        if token:
            axes = self.signature.given_axes(operands, token=True)
        axes = dataclasses.replace(axes, inputs=self.signature.given_inputs(token=token))
        mesh = explicit_mesh(jax.tree.leaves(operands)) or jax.sharding.get_abstract_mesh()
        enough = functools.partial(shares_evenly, mesh)
        inputs = heads.repeated_unless(enough, axes.inputs, operands.inputs, self.signature.y)
        operands = dataclasses.replace(operands, inputs=inputs)
        leaves, structure = jax.tree.flatten(operands)
        letters = jax.tree.leaves(axes)
        names = [name for name, _ in dispatch.named(operands)]
        check_heads_unsharded(
            self.public_name(token=token), list(zip(names, letters, strict=True)), leaves
        )
        leaves = list(match_shardings(letters, *leaves, axis=axis))
        batched = next(i for i, x in enumerate(letters) if "B" in x)
        for i, x in enumerate(letters):
            if "B" not in x:
                whole = leaves[i].astype(jnp.float32)
                leaves[i] = repeated(whole, x, leaves[batched], letters[batched])
        return jax.tree.unflatten(structure, leaves)

    def _forward(self, options: Options) -> Callable[[Forward], YAndState]:
        """The forward pass with its derivative, which is left to JAX for the reference."""
        if options.implementation == "reference":
            return functools.partial(y_and_state, self, "forward", options)
        return functools.partial(sequence, self, options)

    def _of_tokens(self, options: Options, operands: Forward) -> YAndState:
        """`y` and the next state of one token of each row. For rows that have none, the operator
        gets a token that changes no state, if there is one, so that nothing has to go over the
        states again."""
        if not isinstance(operands.packing, Active):
            if options.implementation == "reference":
                return y_and_state(self, "step", options, operands)
            return token(self, options, operands)
        active, identity_token = operands.packing.active, self.signature.identity_token

        def selected(x: Array, otherwise: Array | float) -> Array:
            return jnp.where(jnp.expand_dims(active, tuple(range(1, x.ndim))), x, otherwise)

        numbers = {name: of_form[options.decay] for name, of_form in (identity_token or {}).items()}
        inputs = {name: selected(x, numbers.get(name, 0.0)) for name, x in operands.inputs.items()}
        y, after = self._of_tokens(options, Forward(inputs, operands.state))
        if identity_token is None:
            after = {part: selected(x, operands.state[part]) for part, x in after.items()}
        return selected(y, 0.0), after

    def _in_a_row(self, options: Options, operands: Forward, packing: Sequences) -> YAndState:
        """`y` and the final states of sequences one after another in a single row."""
        count = len(packing.offsets) - 1
        operands = self.started(operands, B=count)
        y = operands.inputs[self.signature.y]
        if y.size == 0 or count == 0:
            return jnp.zeros_like(y), operands.state
        states = {part: x[None] for part, x in operands.state.items()}
        row = Forward(operands.inputs, states, Sequences(packing.offsets[None]))
        y, states = self._forward(options)(self.prepared(row))
        return y, {part: jnp.squeeze(x, 0) for part, x in states.items()}

    # What `dispatch.run` asks for.

    def axes(self, name: Pass, options: Options, operands: Any) -> tuple[Any, Any]:
        signature, packing = self.signature, operands.packing
        match name:
            case "forward":
                return signature.forward_axes(packing), signature.result_axes(packing, options)
            case "backward":
                return signature.backward_axes(packing), signature.gradient_axes(packing)
            case "step":
                return signature.step_axes()
            case "transition":
                given = dataclasses.replace(signature.forward_axes(packing), state={})
                return given, dict(self.transition.axes)
            case "reverse_transition":
                return signature.backward_axes(packing), signature.gradient_axes(packing).state

    def why_not(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Any
    ) -> str | None:
        try:
            implementation = self.imported(choice)
        except ImportError as error:
            return f"{self.implementations[choice]} cannot be imported: {error}"
        return implementation.why_not(options, platform, operands)

    def implementation(
        self, name: Pass, choice: str, options: Options, platform: str, shards: Shards
    ) -> Callable[[Any], Any]:
        implementation = self.imported(choice)
        if name == "step" and not implementation.has_step:
            implementation = self.imported("reference")
        if name == "transition":
            return functools.partial(implementation.transition, self.transition, options, platform)
        compute = functools.partial(getattr(implementation, name), options, platform)
        in_chunks = {"forward": by_chunk.forward, "backward": by_chunk.backward}.get(name)
        if in_chunks is None or implementation.takes_sequences(platform):
            return compute

        def by_rows(operands: Any) -> Any:
            if isinstance(operands.packing, Sequences):
                return in_chunks(self.signature, compute, operands)
            return compute(operands)

        return by_rows

    def describe(self, choice: str, options: Options, platform: str, operands: Any) -> str:
        return self.imported(choice).describe(options, platform, operands)

    def imported(self, choice: str) -> Implementation:
        implementation = self.implementations[choice]
        if isinstance(implementation, str):
            return importlib.import_module(implementation).IMPLEMENTATION
        return implementation


# The derivative.


KEPT = "rwkv_jax"
"""The name of the results of forward passes for `jax.checkpoint_policies`: a policy that saves it
keeps the backward pass from running the forward pass again."""


def y_and_state(operator: Operator, name: Pass, options: Options, operands: Forward) -> YAndState:
    """`y` and the state after the pass "forward" or "step"."""
    result: Result = dispatch.run(operator, name, options, operands)
    return result.y, result.state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sequence(operator: Operator, options: Options, operands: Forward) -> YAndState:
    result: Result = dispatch.run(operator, "forward", options, operands)
    return result.y, result.state


def _sequence_forward(
    operator: Operator, options: Options, operands: Forward
) -> tuple[YAndState, Any]:
    saving = dataclasses.replace(options, save=True)
    result: Result = dispatch.run(operator, "forward", saving, operands)
    result = jax.tree.map(lambda x: checkpoint_name(x, KEPT), result)
    return (result.y, result.state), (operands.inputs, result.states, operands.packing)


def _sequence_backward(
    operator: Operator, options: Options, residuals: Any, cotangents: YAndState
) -> tuple[Forward]:
    inputs, states, packing = residuals
    operands = Backward(inputs, states, *cotangents, packing)
    gradients = dispatch.run(operator, "backward", options, operands)
    return (dataclasses.replace(gradients, packing=None),)


sequence.defvjp(_sequence_forward, _sequence_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def token(operator: Operator, options: Options, operands: Forward) -> YAndState:
    return y_and_state(operator, "step", options, operands)


def _token_forward(
    operator: Operator, options: Options, operands: Forward
) -> tuple[YAndState, Forward]:
    return token(operator, options, operands), operands


def _token_backward(
    operator: Operator, options: Options, operands: Forward, cotangents: YAndState
) -> tuple[Forward]:
    """The gradient of a sequence of one token, whose only saved state is the one before it."""
    (dy, dstate), per_token = cotangents, operator.signature.per_token
    inputs = {name: x[:, None] if name in per_token else x for name, x in operands.inputs.items()}
    states = {part: x[:, None] for part, x in operands.state.items()}
    of_sequence = Backward(inputs, states, dy[:, None], dstate)
    found: Gradients = dispatch.run(operator, "backward", options, of_sequence)
    dinputs = {name: x[:, 0] if name in per_token else x for name, x in found.inputs.items()}
    return (Forward(dinputs, found.state),)


token.defvjp(_token_forward, _token_backward)


PUBLIC: dict[Callable[..., Any], Operator] = {}
"""The operator of each public function. A step has the name of its operator and `_step`."""


def public(operator: Operator) -> Callable[[Fn], Fn]:
    """Registers a public function of an operator for `rwkv_jax.sharding` and
    `rwkv_jax.implementations`. Its parameters have the names of the operands, `initial_state` or
    `state`, and those of the options of `wkv7` or `wkv7_step`. `rwkv_jax.implementations` finds it
    by its name, so no other one may have that name."""

    def register(function: Fn) -> Fn:
        name, module = function.__name__, function.__module__
        for other in PUBLIC:
            if other.__name__ == name and other.__module__ != module:
                raise ValueError(f"{name} of {module}: {other.__module__} has an operator {name}")
        PUBLIC[function] = operator
        return function

    return register
