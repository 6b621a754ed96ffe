"""An operator: its signature, what a run of its tokens does to a state, and its implementations."""

from collections.abc import Mapping
from dataclasses import dataclass

from rwkv_jax._operator.implementation import Implementation, Summary
from rwkv_jax._operator.signature import Signature


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
