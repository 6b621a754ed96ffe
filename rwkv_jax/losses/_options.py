"""The options of a loss, and into how many slabs its tokens are cut."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jax import lax

Axis: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes over which the vocabulary is distributed, in this order; None if it is not."""

SLAB_BYTES = 2**30
"""How many bytes of float32 logits a slab has at most, unless the caller says how many tokens. With
a vocabulary of 65536 a slab then has 4096 tokens. A product of so many rows runs at full speed, and
the gradient of the weight, which every slab reads and writes, costs little beside it."""


@dataclass(frozen=True)
class Plan:
    """How the slabs of a call are computed. The results differ by rounding at most."""

    tokens: int | None = None
    """How many tokens a slab has at most; as many as `SLAB_BYTES` allow if None."""
    unroll: int = 1
    """How many slabs one iteration of the loop over them computes."""
    passes: Literal[1, 2] = 2
    """In how many passes over the logits of a slab their largest and the sum of their exponentials
    are found: one after another, or together with two exponentials for each logit."""
    dweight: Literal["carried", "stored"] = "carried"
    """Whether the gradient of the weight is carried from slab to slab in float32, or computed by
    one product from the gradients of all logits, which are then stored in the dtype of the
    features."""

    barrier: bool = True
    """Whether the gradient of the logits is an array of its own. Without that, the compiler may
    compute it in each of the two products that read it."""

    def slabs(self, tokens: int, vocabulary: int) -> tuple[int, int]:
        """The number of slabs, and the size of each. The last one may be filled up."""
        most = self.tokens or max(1, SLAB_BYTES // (4 * vocabulary))
        count = max(1, -(-tokens // most))
        return count, -(-tokens // count)


@dataclass(frozen=True)
class Options:
    """The options that change results, and the plan."""

    z_loss: float = 0.0
    l2_wrap: float = 0.0
    soft_cap: float | None = None
    precision: lax.Precision | None = None
    plan: Plan = field(default_factory=Plan)
