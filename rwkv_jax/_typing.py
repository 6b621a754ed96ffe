"""The words and the axis letters of this package, and the types of its arrays.

Axes, each with one letter everywhere:

    B  rows of a batch                 N  chunks of a row: saved states
    T  tokens of a row: time           S  sequences of `cu_seqlens`
    H  heads                           Z  offsets of `cu_seqlens`, S + 1
    K  key channels of a head          P  rows of a pool of states
    V  value channels of a head        M  words of marks in native kernels
    C  channels, of operators without heads
    L  a second K, in the map of a summary

Words, each with one meaning everywhere:

    chunk     64 tokens; a state is saved before each chunk for the backward pass
    link      32 tokens in plain `jax.numpy`: what is solved at once beside other links
    tile      16 tokens, or a 16 x 16 matrix: what one matrix instruction takes
    segment   consecutive tokens of a row with the same id in `segment_ids`, such as a document
    mark      of a token: it continues a segment, starts one, or is padding
    sequence  one of `cu_seqlens`, with a state of its own
    split     a part of a sequence that runs beside others on one device
    shard     the part of an array that one device has
    summary   what a run of tokens does to a state, as a map that composes
    pool      the states of a server; a slot is a row of it
    round     of a pool that serves: requests get slots, pieces of prompts are read, tokens decoded
    pass      what an implementation computes: forward, backward, step, summary, reverse summary
    slab      tokens whose intermediate results are in memory at once: in losses their logits, in
              plain `jax.numpy` the links of some chunks of all rows
    panel     in CUDA kernels, an array in shared memory with rows of 64 elements
"""

from typing import Literal, TypeAlias

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float32

Operand: TypeAlias = jax.Array | np.ndarray
"""What a public function takes; `_operator.check` says which shapes and dtypes it accepts."""

Precision: TypeAlias = lax.Precision | Literal["default", "high", "highest"] | None
"""How exactly products are computed."""

State: TypeAlias = Float32[Array, "B H V K"]
"""The state of an operator with heads."""
