"""The operands and options of a loss, and into how many chunks its tokens are cut."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from jax import Array, lax
from jaxtyping import Float, Float32, Integer

Axis: TypeAlias = str | tuple[str, ...] | None
"""Mesh axes over which the vocabulary is distributed, in this order; None if it is not."""

CHUNK_BYTES = 2**30
"""How many bytes of float32 logits a chunk has at most, unless the caller says how many tokens.
With a vocabulary of 65536 a chunk then has 4096 tokens. A product of so many rows runs at full
speed, and the gradient of the weight, which every chunk reads and writes, costs little beside
it."""


class Tokens(NamedTuple):
    """What is known of each token. Its loss is multiplied by `scale`, which is 0 if the token does
    not count."""

    hidden_states: Float[Array, "*shape C"]
    targets: Integer[Array, "*shape"]
    scale: Float32[Array, "*shape"]


@dataclass(frozen=True)
class Options:
    """The options of a loss. `chunk_size` is how many tokens a chunk has at most; as many as
    `CHUNK_BYTES` allow if None."""

    z_loss: float = 0.0
    l2_wrap: float = 0.0
    soft_cap: float | None = None
    precision: lax.Precision | None = None
    chunk_size: int | None = None
    implementation: None = None


def chunks(most: int | None, tokens: int, vocabulary: int) -> tuple[int, int]:
    """The number of chunks, and the size of each, which is at most `most`. The last one may be
    filled up."""
    most = most or max(1, CHUNK_BYTES // (4 * vocabulary))
    count = max(1, -(-tokens // most))
    return count, -(-tokens // count)
