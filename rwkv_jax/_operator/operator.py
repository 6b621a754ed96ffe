"""An operator: its signature, what a run of its tokens does to a state, and its implementations."""

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rwkv_jax._operator.call import Operands, Options, Packing, Sequences
from rwkv_jax._operator.implementation import Implementation, Summary
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import by_chunk

Pass: TypeAlias = Literal["forward", "backward", "step", "summary", "reverse_summary"]


@dataclass(frozen=True, eq=False)
class Operator:
    """All that the machinery knows of an operator.

    Every operator has "reference", which JAX differentiates, and may have "xla", "pallas" and
    "ffi".
    """

    signature: Signature
    summary: Summary
    implementations: Mapping[str, Implementation]

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def step_name(self) -> str:
        return f"{self.name}_step"

    def title(self, name: Pass) -> str:
        """The public function that a pass belongs to."""
        return self.step_name if name == "step" else self.name

    def axes(self, name: Pass, options: Options, packing: Packing) -> tuple[Any, Any]:
        """The axes of the operands and of the results of a pass."""
        signature = self.signature
        match name:
            case "forward":
                return signature.forward_axes(packing), signature.result_axes(packing, options)
            case "backward":
                return signature.backward_axes(packing), signature.gradient_axes(packing)
            case "step":
                return signature.step_axes()
            case "summary":
                operands = dataclasses.replace(signature.forward_axes(packing), state={})
                return operands, dict(self.summary.axes)
            case "reverse_summary":
                return signature.backward_axes(packing), signature.gradient_axes(packing).state

    def compute(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Any
    ) -> Any:
        """The results of a pass, by the implementation of the name `choice`."""
        implementation = self.implementations[choice]
        if name == "summary":
            return implementation.summary(self.summary, options, platform, operands)
        in_a_row = isinstance(operands.packing, Sequences)
        if in_a_row and not implementation.takes_sequences(platform):
            passes = {"forward": by_chunk.forward, "backward": by_chunk.backward}
            compute = functools.partial(getattr(implementation, name), options, platform)
            return passes[name](self.signature, compute, operands)
        return getattr(implementation, name)(options, platform, operands)

    def why_not(
        self, choice: str, platform: str, options: Options, operands: Operands
    ) -> str | None:
        """Why the implementation of the name `choice` cannot run a pass, or None."""
        implementation = self.implementations[choice]
        return implementation.why_not(platform, options, operands.inputs, operands.packing)

    def has_rule(self, options: Options) -> bool:
        """Whether the passes have rules of their own for vmap and for meshes. The reference is left
        to JAX and to the compiler."""
        return options.implementation != "reference"
