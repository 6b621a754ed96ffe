"""The native implementation of any operator.

A target takes the operands of a pass in the order of the operator's signature and decides by
itself, for the device that runs it, which kernel computes the call. Python has to know what a
target takes and returns, and an upper bound of the scratch that any device may need.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax._native import cuts, gpus, library, packing
from rwkv_jax._operator import check, heads
from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Operands,
    Options,
    Packing,
    Result,
    Sequences,
    chunks,
)
from rwkv_jax._operator.implementation import Implementation, Transition
from rwkv_jax._operator.signature import Signature

TARGETS = {
    "forward": "fwd",
    "backward": "bwd",
    "step": "step",
    "transition": "transition",
    "reverse_transition": "reverse_transition",
}
"""The pass of a target, as its name has it."""

VERSION = "v2"

HEAD_SIZES = {"cpu": (16, 32, 64, 128, 256), "cuda": (16, 32, 64, 128)}
"""The sizes K = V of the kernels of operators with heads."""

DECAYS = {"log": 0, "exp": 1, "sigmoid": 2}
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
PACKINGS: dict[type, int] = {type(None): 0, Marks: 1, Sequences: 2}

Results = Sequence[tuple[Sequence[int], Any]]
"""Shapes and dtypes."""


@dataclass(frozen=True, eq=False)
class NativeKernels(Implementation):
    """C++ kernels on CPUs and CUDA kernels on GPUs, compiled as XLA FFI targets.

    signature: the operands. Their order is that of the targets.
    head_sizes: for each platform the sizes K = V that all of its kernels take; None without heads.
    has_transitions: whether there are targets for transitions on CUDA.
    shares_keys: whether the CUDA kernels on matrix units take heads that share keys.
    """

    signature: Signature
    head_sizes: Mapping[str, tuple[int, ...]] | None = None
    has_transitions: bool = True
    shares_keys: bool = False
    has_step = True

    def __post_init__(self) -> None:
        passes = list(TARGETS) if self.has_transitions else ["forward", "backward", "step"]
        library.register_export_targets(*map(self._target, passes))

    def _target(self, name: str) -> str:
        return f"rwkv_{self.signature.name}_{TARGETS[name]}_{VERSION}"

    def why_not(self, options: Options, platform: str, operands: Operands) -> str | None:
        if reason := library.why_not(platform):
            return reason
        sizes = self.signature.sizes(operands.inputs)
        # Kernels for CPUs have scratch of their own, and steps have none.
        if platform == "cuda" and "T" in sizes and (reason := check.symbolic(sizes, "BTHC")):
            return f"{reason}; the cuda kernels are planned for numbers"
        if self.head_sizes is None:
            return None
        accepted = self.head_sizes[platform]
        if sizes["K"] == sizes["V"] and sizes["K"] in accepted:
            return None
        reason = (
            f"K = {sizes['K']} and V = {sizes['V']}; the {platform} kernels take K = V out of "
            + ", ".join(map(str, accepted))
        )
        if platform == "cpu" or "T" not in sizes:
            return reason
        # Those on matrix units take more sizes.
        whys = [why for why in self.why_by_token(options, platform, operands) if why]
        return f"{reason}; {whys[0]}" if whys else None

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        by_token = "C++" if platform == "cpu" else "CUDA"
        by_token = f"{by_token} kernels, one token at a time in float32"
        if self.head_sizes is None and platform == "cuda":
            return "CUDA kernels, runs of tokens side by side in float32"
        if platform == "cpu" or "T" not in self.signature.sizes(operands.inputs):
            return by_token
        dtype = operands.inputs[self.signature.y].dtype
        terms = "two bfloat16 of each number" if dtype == jnp.float32 else "bfloat16"
        ways = [
            f"{by_token}: {why}"
            if why
            else f"CUDA kernels on matrix units, {terms} with float32 sums"
            for why in self.why_by_token(options, platform, operands)
        ]
        return ways[0] if len(set(ways)) == 1 else f"{ways[0]}; backward {ways[1]}"

    def why_by_token(self, options: Options, platform: str, operands: Operands) -> list[str]:
        """Why no kernels on matrix units compute the forward and the backward pass of a training
        step on every GPU, or "" where they do. The native code that chooses kernels says so."""
        problem = self._problem(dataclasses.replace(options, save=True), operands)
        n = self.cuts(platform, operands)
        problem |= {"heads": problem["heads"] * n, "value_size": problem["value_size"] // n}
        plan = functools.partial(library.module(platform).plan, self.signature.name)
        return [plan(name, **gpus.limits(), **problem)["why"] for name in ("fwd", "bwd")]

    def cuts(self, platform: str, operands: Operands) -> int:
        """Into how many heads each head is cut along V in the forward and the backward pass."""
        sizes = self.signature.sizes(operands.inputs)
        return cuts.count(sizes["K"], sizes["V"]) if platform == "cuda" and self.shares_keys else 1

    def _given(self, operands: Operands) -> tuple[Arrays, Sequence[Array], tuple[int, int]]:
        """The inputs by name in the order of the signature, parameters once for each row or
        sequence; what tells kernels of the packing; and the rows and their saved states."""
        signature = self.signature
        inputs = {name: operands.inputs[name] for name in signature.inputs}
        rows, tokens = inputs[signature.per_token[0]].shape[:2]
        match operands.packing:
            case Marks(marks):
                return inputs, [packing.words(marks)], (rows, chunks(tokens))
            case Sequences(offsets):
                spans, owners = packing.spans(offsets, tokens)
                for name in signature.shared:
                    inputs[name] = jnp.repeat(inputs[name], offsets.shape[1] - 1, axis=0)
                return inputs, [spans, owners], (rows, owners.shape[1])
            case _:
                return inputs, [], (rows, chunks(tokens))

    def _states(self, operands: Operands, states: Arrays) -> Arrays:
        ordered = {part: states[part] for part in self.signature.state}
        return _as_one_batch(operands.packing, ordered)

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        """The size of each axis; H is that of the heads of values, where heads share keys."""
        signature = self.signature
        return signature.sizes(inputs) | check.sizes(
            {signature.y: signature.inputs[signature.y]}, inputs
        )

    def _problem(self, options: Options, operands: Operands) -> dict[str, int]:
        """The sizes and choices from which native code plans a call."""
        inputs, packing = operands.inputs, operands.packing
        sizes = self._sizes(inputs)
        count = sizes["B"]
        if isinstance(packing, Sequences):
            count *= max(packing.offsets.shape[-1] - 1, 0)
        return {
            "decay": DECAYS[options.decay],
            "exact": int(options.exact),
            "packing": PACKINGS[type(packing)],
            "dtype": DTYPES[str(inputs[self.signature.y].dtype)],
            "rows": sizes["B"],
            "tokens": sizes["T"],
            "sequences": count,
            "heads": sizes["H"] if "H" in sizes else sizes["C"],
            "head_size": sizes.get("K", 1),
            "value_size": sizes.get("V", 1),
            "saves": int(options.save),
        }

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        signature, packing = self.signature, operands.packing
        n = self.cuts(platform, operands)
        operands = cuts.cut(signature.forward_axes(packing), operands, n)
        results, given, attributes, found = self.forward_call(options, platform, operands)
        result = found(library.call(self._target("forward"), results, *given, **attributes))
        return cuts.joined(signature.result_axes(packing, options), result, n)

    def forward_call(
        self, options: Options, platform: str, operands: Forward
    ) -> tuple[Results, Sequence[Array], dict[str, Any], Callable[[Sequence[Array]], Result]]:
        """What `library.call` takes for the forward pass (results, operands, attributes), and what
        makes a `Result` of what it gives. A target may have further operands and results, which
        come last."""
        inputs, of_packing, (rows, count) = self._given(operands)
        state = self._states(operands, operands.state)
        y = operands.inputs[self.signature.y]
        count = count if options.save else 0
        dtype = self.signature.states_dtype(options, operands.inputs)
        saved = [((rows, count, *x.shape[1:]), dtype) for x in state.values()]
        scratch, attributes = self._problem_of("forward", options, platform, operands)

        def result(found: Sequence[Array]) -> Result:
            y, *states = found
            after = _by_row(operands.packing, dict(zip(state, states, strict=False)))
            saved = dict(zip(state, states[len(state) :], strict=False)) if options.save else {}
            return Result(y, after, saved)

        results = [(y.shape, y.dtype), *_like(state), *saved, scratch]
        return results, (*inputs.values(), *state.values(), *of_packing), attributes, result

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        signature, packing = self.signature, operands.packing
        n = self.cuts(platform, operands)
        operands = cuts.cut(signature.backward_axes(packing), operands, n)
        results, given, attributes, found = self.backward_call(options, platform, operands)
        result = found(library.call(self._target("backward"), results, *given, **attributes))
        return cuts.joined(signature.gradient_axes(packing), result, n)

    def backward_call(
        self, options: Options, platform: str, operands: Backward
    ) -> tuple[Results, Sequence[Array], dict[str, Any], Callable[[Sequence[Array]], Gradients]]:
        """As `forward_call`, for the gradients and the backward pass. Targets have a gradient for
        each of the heads that share keys."""
        inputs, of_packing, _ = self._given(operands)
        dstate = self._states(operands, operands.dstate)
        states = [operands.states[part] for part in dstate]
        scratch, attributes = self._problem_of("backward", options, platform, operands)
        shapes = {name: x.shape for name, x in inputs.items()}
        of_keys = [name for name in inputs if self.shares_keys and name != self.signature.y]
        for name in of_keys:
            *rest, _, size = inputs[name].shape
            shapes[name] = *rest, self._sizes(inputs)["H"], size

        def gradients(found: Sequence[Array]) -> Gradients:
            dinputs = dict(zip(inputs, found, strict=False))
            dinputs |= {n: heads.summed(dinputs[n], inputs[n].shape[-2]) for n in of_keys}
            before = dict(zip(dstate, found[len(inputs) :], strict=False))
            if isinstance(operands.packing, Sequences):
                # Those of parameters are added up over the sequences of each row.
                shared = {name: dinputs[name] for name in self.signature.shared}
                shared = _by_row(operands.packing, shared)
                dinputs |= {name: jnp.sum(x, axis=1) for name, x in shared.items()}
            return Gradients(dinputs, _by_row(operands.packing, before))

        of_inputs = [(shapes[name], x.dtype) for name, x in inputs.items()]
        results = [*of_inputs, *_like(dstate), scratch]
        given = (*inputs.values(), *states, operands.dy, *dstate.values(), *of_packing)
        return results, given, attributes, gradients

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self.step_of(self._target("step"), options, operands)

    def step_of(self, target: str, options: Options, operands: Forward, *further: Array) -> Result:
        """The results of a target for one token, which may have further operands."""
        signature = self.signature
        inputs = [operands.inputs[name] for name in signature.inputs]
        state = {part: operands.state[part] for part in signature.state}
        y = operands.inputs[signature.y]
        found = library.call(
            target,
            [(y.shape, y.dtype), *_like(state)],
            *inputs,
            *state.values(),
            *further,
            aliases={len(inputs) + i: 1 + i for i in range(len(state))},
            decay=DECAYS[options.decay],
        )
        return Result(found[0], dict(zip(state, found[1:], strict=True)), {})

    def transition(
        self, transition: Transition, options: Options, platform: str, operands: Forward
    ) -> Arrays:
        if not self._has_kernels_for_transitions(options, platform, operands):
            return super().transition(transition, options, platform, operands)
        inputs, of_packing, _ = self._given(operands)
        sizes = self.signature.sizes(operands.inputs)
        sizes["L"] = sizes["K"]
        results = [([sizes[x] for x in axes], jnp.float32) for axes in transition.axes.values()]
        scratch, attributes = self._problem_of("transition", options, platform, operands)
        given = *inputs.values(), *of_packing
        found = library.call(self._target("transition"), [*results, scratch], *given, **attributes)
        return dict(zip(transition.axes, found, strict=False))

    def reverse_transition(self, options: Options, platform: str, operands: Backward) -> Arrays:
        if not self._has_kernels_for_transitions(options, platform, operands):
            return super().reverse_transition(options, platform, operands)
        inputs, of_packing, _ = self._given(operands)
        dstate = self._states(operands, operands.dstate)
        scratch, attributes = self._problem_of("reverse_transition", options, platform, operands)
        found = library.call(
            self._target("reverse_transition"),
            [*_like(dstate), scratch],
            *(*inputs.values(), operands.dy, *dstate.values(), *of_packing),
            **attributes,
        )
        return dict(zip(dstate, found, strict=False))

    def _has_kernels_for_transitions(
        self, options: Options, platform: str, operands: Operands
    ) -> bool:
        if not self.has_transitions or platform != "cuda":
            return False
        problem = self._problem(options, operands)
        return library.has_transition(platform, self.signature.name, **problem)

    def _problem_of(
        self, name: str, options: Options, platform: str, operands: Operands
    ) -> tuple[tuple[tuple[int], Any], dict[str, Any]]:
        """The shape and the dtype of the scratch of a pass, and the attributes of its target."""
        problem = self._problem(options, operands)
        floats = 0
        if platform == "cuda":
            floats = library.scratch(platform, self.signature.name, TARGETS[name], **problem)
        attributes = {name: problem[name] for name in ("decay", "exact", "packing")}
        return ((floats,), jnp.float32), attributes


def _like(arrays: Arrays) -> Results:
    return [(x.shape, x.dtype) for x in arrays.values()]


def _as_one_batch(packing: Packing, states: Arrays) -> Arrays:
    """States [B, ...], or [B, S, ...] as those of one batch."""
    if not isinstance(packing, Sequences):
        return states
    return {part: x.reshape(-1, *x.shape[2:]) for part, x in states.items()}


def _by_row(packing: Packing, states: Arrays) -> Arrays:
    """The inverse."""
    if not isinstance(packing, Sequences):
        return states
    rows, offsets = packing.offsets.shape
    return {part: x.reshape(rows, offsets - 1, *x.shape[1:]) for part, x in states.items()}
