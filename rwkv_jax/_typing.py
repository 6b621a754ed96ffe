"""The words and the axis letters of this package, and the types of its arrays.

Axes, each with one letter everywhere:

    B  rows of a batch                 N  chunks of a row: saved states
    T  tokens of a row: time           S  sequences of `cu_seqlens`
    H  heads                           Z  offsets of `cu_seqlens`, S + 1
    K  key channels of a head          P  rows of a pool of states
    V  value channels of a head        M  words of marks in native kernels
    C  channels, of operators without heads
    G  heads of keys that several heads of values share
    L  a second K, in a chunk transition

Words, each with one meaning everywhere:

    chunk     64 tokens; a state is saved before each chunk for the backward pass. In losses,
              tokens whose logits are in memory at once
    sub-chunk 32 or 64 tokens in plain `jax.numpy`, solved at once beside other sub-chunks
    chunk group
              chunks of all rows whose intermediate results are in memory at once, in plain
              `jax.numpy`
    prefill chunk
              tokens of a prompt that a server or `generate` reads in one call
    tile      16 tokens, or a 16 x 16 matrix: what one matrix instruction takes
    segment   consecutive tokens of a row with the same id in `segment_ids`, such as a document
    mark      of a token: it continues a segment, starts one, or is padding
    sequence  one of `cu_seqlens`, with a state of its own
    split     a part of a sequence that runs beside others on one device
    shard     the part of an array that one device has
    chunk transition
              what a run of tokens does to a state, as a map that composes; transition, for short
    pool      the states of a server; a slot is a row of it
    scheduler step
              of a pool that serves: requests get slots, prefill chunks are read, tokens decoded
    deferred  of a state: its updates wait, and several are made at once
    pass      what an implementation computes: forward, backward, step, transition,
              reverse transition
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
