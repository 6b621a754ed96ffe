"""The native implementation of any operator.

A target takes the operands of a pass in the order of the operator's signature and decides by
itself, for the device that runs it, which kernel computes the call. Python has to know what a
target takes and returns, and an upper bound of the scratch that any device may need.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax._native import library, packing
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
)
from rwkv_jax._operator.implementation import Implementation, Summary
from rwkv_jax._operator.saved import chunks
from rwkv_jax._operator.signature import Signature

TARGETS = {
    "forward": "fwd",
    "backward": "bwd",
    "step": "step",
    "summary": "summary",
    "reverse_summary": "reverse_summary",
}
"""The pass of a target, as its name has it."""

VERSION = "v2"

MATRIX_UNITS = "matrix units"
"""The name of such kernels in a plan."""

HEAD_SIZES = {"cpu": (16, 32, 64, 128, 256), "cuda": (16, 32, 64, 128)}
"""The sizes K = V of the kernels of operators with heads."""

DECAYS = {"log": 0, "exp": 1, "sigmoid": 2}
DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
PACKINGS: dict[type, int] = {type(None): 0, Marks: 1, Sequences: 2}

Results = Sequence[tuple[Sequence[int], Any]]
"""Shapes and dtypes."""


class NativeKernels(Implementation):
    """C++ kernels on CPUs and CUDA kernels on GPUs, compiled as XLA FFI targets."""

    def __init__(
        self,
        signature: Signature,
        *,
        head_sizes: Mapping[str, tuple[int, ...]] | None = None,
        has_summaries: bool = True,
    ) -> None:
        """Args:
        signature: the operands. Their order is that of the targets.
        head_sizes: for each platform the sizes K = V that its kernels take; None without heads.
        has_summaries: whether there are targets for summaries on CUDA.
        """
        self._signature, self._head_sizes = signature, head_sizes
        self._has_summaries = has_summaries
        passes = list(TARGETS) if has_summaries else ["forward", "backward", "step"]
        self.targets = tuple(map(self._target, passes))

    def _target(self, name: str) -> str:
        return f"rwkv_{self._signature.name}_{TARGETS[name]}_{VERSION}"

    def why_not(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str | None:
        if reason := library.why_not(platform):
            return reason
        if self._head_sizes is None:
            return None
        sizes = self._sizes(inputs)
        accepted = self._head_sizes[platform]
        if sizes["K"] != sizes["V"] or sizes["K"] not in accepted:
            return (
                f"K = {sizes['K']} and V = {sizes['V']}; the {platform} kernels take K = V out of "
                + ", ".join(map(str, accepted))
            )
        return None

    def takes_sequences(self, platform: str) -> bool:
        return True

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        by_token = "C++" if platform == "cpu" else "CUDA"
        by_token = f"{by_token} kernels, one token at a time in float32"
        if self._head_sizes is None and platform == "cuda":
            return "CUDA kernels, runs of tokens side by side in float32"
        if platform == "cpu" or "T" not in self._sizes(inputs):
            return by_token
        by_matrix_units = "CUDA kernels on matrix units, bfloat16 with float32 sums"
        ways = [
            by_matrix_units if on_matrix_units else by_token
            for on_matrix_units in self.on_matrix_units(platform, options, inputs, packing)
        ]
        return ways[0] if len(set(ways)) == 1 else f"{ways[0]}; backward {ways[1]}"

    def on_matrix_units(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> list[bool]:
        """Whether kernels on matrix units compute the passes of a training step on every device of
        the platform: the forward pass, and the backward pass."""
        problem = self._problem(options.saving(True), inputs, packing)
        plans = library.plans(platform, self._signature.name, ("fwd", "bwd"), **problem)
        return [plan["kernel"] == MATRIX_UNITS for plan in plans]

    def _sizes(self, inputs: Mapping[str, Any]) -> dict[str, int]:
        signature = self._signature
        token = len(inputs[signature.y].shape) < len(signature.inputs[signature.y])
        return signature.sizes(inputs, token=token)

    def _problem(
        self, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> dict[str, int]:
        """The sizes and choices from which native code plans a call."""
        sizes = self._sizes(inputs)
        count = sizes["B"]
        if isinstance(packing, Sequences):
            count *= max(packing.offsets.shape[-1] - 1, 0)
        return {
            "decay": DECAYS[options.decay],
            "exact": int(options.exact),
            "packing": PACKINGS[type(packing)],
            "dtype": DTYPES[str(inputs[self._signature.y].dtype)],
            "rows": sizes["B"],
            "tokens": sizes["T"],
            "sequences": count,
            "heads": sizes["H"] if "H" in sizes else sizes["C"],
            "head_size": sizes.get("K", 1),
            "saves": int(options.save),
        }

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        return self.forward_by(self._target("forward"), options, platform, operands)[0]

    def forward_by(
        self,
        target: str,
        options: Options,
        platform: str,
        operands: Forward,
        more: Sequence[Array] = (),
        more_results: Results = (),
    ) -> tuple[Result, tuple[Array, ...]]:
        """What a target gives in place of the results, and its further results. The target takes
        and returns what that of the forward pass does, and more behind."""
        call = _Rows(self._signature, operands)
        state = call.states(operands.state)
        y = operands.inputs[self._signature.y]
        count = call.chunks if options.save else 0
        dtype = self._signature.states_dtype(options, operands.inputs)
        saved = [((call.rows, count, *x.shape[1:]), dtype) for x in state.values()]
        results = [(y.shape, y.dtype), *_like(state), *saved]
        found = self._call(
            *("forward", options, platform, call, [*state.values()], results),
            target=target,
            more=more,
            more_results=more_results,
        )
        after = dict(zip(state, found[1:], strict=False))
        states = dict(zip(state, found[1 + len(state) :], strict=False)) if options.save else {}
        return Result(found[0], call.opened(after), states), found[len(results) :]

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        return self.backward_by(self._target("backward"), options, platform, operands)[0]

    def backward_by(
        self,
        target: str,
        options: Options,
        platform: str,
        operands: Backward,
        more: Sequence[Array] = (),
        more_results: Results = (),
    ) -> tuple[Gradients, tuple[Array, ...]]:
        """As `forward_by`, for the gradients and the backward pass."""
        call = _Rows(self._signature, operands)
        dstate = call.states(operands.dstate)
        states = [operands.states[part] for part in dstate]
        results = [*_like(call.inputs), *_like(dstate)]
        arrays = [*states, operands.dy, *dstate.values()]
        found = self._call(
            *("backward", options, platform, call, arrays, results),
            target=target,
            more=more,
            more_results=more_results,
        )
        inputs = dict(zip(call.inputs, found, strict=False))
        before = dict(zip(dstate, found[len(inputs) :], strict=False))
        gradients = Gradients(call.summed(inputs), call.opened(before))
        return gradients, found[len(results) :]

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        signature = self._signature
        inputs = [operands.inputs[name] for name in signature.inputs]
        state = {part: operands.state[part] for part in signature.state}
        y = operands.inputs[signature.y]
        found = library.call(
            self._target("step"),
            [(y.shape, y.dtype), *_like(state)],
            *inputs,
            *state.values(),
            aliases={len(inputs) + i: 1 + i for i in range(len(state))},
            decay=DECAYS[options.decay],
        )
        return Result(found[0], dict(zip(state, found[1:], strict=True)), {})

    def summary(
        self, summary: Summary, options: Options, platform: str, operands: Forward
    ) -> Arrays:
        if not self._summarizes(options, platform, operands):
            return super().summary(summary, options, platform, operands)
        call = _Rows(self._signature, operands)
        sizes = self._sizes(operands.inputs)
        sizes["L"] = sizes["K"]
        axes = dict(summary.axes)
        results = [([sizes[x] for x in letters], jnp.float32) for letters in axes.values()]
        found = self._call("summary", options, platform, call, [], results)
        return dict(zip(axes, found, strict=True))

    def reverse_summary(self, options: Options, platform: str, operands: Backward) -> Arrays:
        if not self._summarizes(options, platform, operands):
            return super().reverse_summary(options, platform, operands)
        call = _Rows(self._signature, operands)
        dstate = call.states(operands.dstate)
        cotangents = [operands.dy, *dstate.values()]
        found = self._call("reverse_summary", options, platform, call, cotangents, _like(dstate))
        return dict(zip(dstate, found, strict=True))

    def _summarizes(self, options: Options, platform: str, operands: Operands) -> bool:
        if not self._has_summaries or platform != "cuda":
            return False
        problem = self._problem(options, operands.inputs, operands.packing)
        return library.has_summary(platform, self._signature.name, **problem)

    def _call(
        self,
        name: str,
        options: Options,
        platform: str,
        call: "_Rows",
        arrays: Sequence[Array],
        results: Results,
        *,
        target: str | None = None,
        more: Sequence[Array] = (),
        more_results: Results = (),
    ) -> tuple[Array, ...]:
        """The results of a target, that of the pass if None, but its scratch. A target takes the
        inputs, then the arrays that its pass has besides, and then the packing and `more`."""
        problem = self._problem(options, call.operands.inputs, call.operands.packing)
        floats = library.scratch(platform, self._signature.name, TARGETS[name], **problem)
        found = library.call(
            target or self._target(name),
            [*results, ((floats,), jnp.float32), *more_results],
            *call.inputs.values(),
            *arrays,
            *call.packing,
            *more,
            decay=problem["decay"],
            exact=problem["exact"],
            packing=problem["packing"],
        )
        return (*found[: len(results)], *found[len(results) + 1 :])


def _like(arrays: Arrays) -> Results:
    return [(x.shape, x.dtype) for x in arrays.values()]


class _Rows:
    """A call as kernels take it: in the order of the signature, and with the sequences of all rows
    as one batch.

    operands: the call as implementations take it.
    inputs: by name. Parameters stand once for each row, or for each sequence.
    packing: the operands behind all others.
    rows, chunks: the rows of tokens, and the saved states of each.
    """

    def __init__(self, signature: Signature, operands: Operands) -> None:
        inputs = {name: operands.inputs[name] for name in signature.inputs}
        self.operands, self._signature, self._count = operands, signature, None
        self.rows, tokens = inputs[signature.timed[0]].shape[:2]
        self.chunks = chunks(tokens)
        match operands.packing:
            case Marks(marks):
                self.packing: Sequence[Array] = [packing.words(marks)]
            case Sequences(offsets):
                self._count = offsets.shape[1] - 1
                self.packing = packing.spans(offsets, tokens)
                self.chunks = self.packing.owners.shape[1]
                for name in signature.shared:
                    inputs[name] = jnp.repeat(inputs[name], self._count, axis=0)
            case _:
                self.packing = []
        self.inputs = inputs

    def states(self, states: Arrays) -> Arrays:
        """States [B, ...], or [B, S, ...] as those of one batch."""
        ordered = {part: states[part] for part in self._signature.state}
        if self._count is None:
            return ordered
        return {p: x.reshape(-1, *x.shape[2:]) for p, x in ordered.items()}

    def opened(self, states: Arrays) -> Arrays:
        """The inverse of `states`."""
        if self._count is None:
            return states
        return {p: x.reshape(self.rows, self._count, *x.shape[1:]) for p, x in states.items()}

    def summed(self, gradients: Arrays) -> Arrays:
        """The gradients of parameters added up over the sequences of each row."""
        if self._count is None:
            return gradients
        shared = {name: gradients[name] for name in self._signature.shared}
        return gradients | {name: jnp.sum(x, axis=1) for name, x in self.opened(shared).items()}
