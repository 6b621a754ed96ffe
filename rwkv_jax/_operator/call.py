"""The operands and results of each pass, as typed trees.

A call is carried in one of these values from the argument checks to the implementation that runs
it. The same classes hold arrays, the axes of arrays (strings of the letters in `rwkv_jax._typing`),
shapes or partition specs, so that `jax.tree.map` pairs an operand with its axes.

A packing says how several sequences share the rows of a batch:

    None         each row is one sequence
    SegmentIds   what a caller gave: the id of each token; tokens of one segment have the same id
    Marks        what implementations get for it: whether a token continues a segment, starts one,
                 or is padding
    Sequences    offsets of sequences in a row, each with a state of its own

Of a step, which computes one token of each row:

    Active       which rows have a token
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import jax
from jax import Array, lax

CHUNK = 64
"""Tokens between two saved states: `states[:, n]` is the state before token `n * CHUNK`. All
implementations of an operator save the same states, so that any forward pass can feed any backward
pass. The native kernels have the same number as `kChunk`."""


def chunks(tokens: int) -> int:
    """How many states a sequence saves: one before each chunk, also before a short last one."""
    return -(-tokens // CHUNK)


Leaf = TypeVar("Leaf")

Arrays: TypeAlias = dict[str, Array]
"""Arrays by the name of the operand."""


@dataclass(frozen=True)
class Options:
    """What a caller chooses, hashable, so that it can be a static argument.

    decay: the form in which `w` gives the decay; one of the operator's `decays`, None without `w`.
    precision: as the operator takes it, None made DEFAULT.
    implementation: the name of the only one to use, or None.
    save: whether the forward pass returns the states at chunk boundaries.
    scale: what `y` is multiplied by, of operators that have this option; None for K^(-1/2).
    """

    decay: Any = None
    precision: lax.Precision = lax.Precision.DEFAULT
    implementation: str | None = None
    save: bool = False
    scale: float | None = None

    def scale_of(self, key_size: int) -> float:
        return key_size**-0.5 if self.scale is None else self.scale

    @property
    def exact(self) -> bool:
        """Whether 16-bit operands, too, are computed in float32."""
        return self.precision == lax.Precision.HIGHEST


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SegmentIds(Generic[Leaf]):
    """`ids` [B, T]: any integers; 0 is padding."""

    ids: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Marks(Generic[Leaf]):
    """`marks` [B, T] of uint8: CONTINUES, STARTS or PADDING of `rwkv_jax._packing.segments`."""

    marks: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sequences(Generic[Leaf]):
    """`offsets` [Z] of int32, or [B, Z] inside the operators: the sequence s has the tokens from
    offset s to offset s + 1. States have the axis S = Z - 1 replacing B, or after it."""

    offsets: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Active(Generic[Leaf]):
    """`active` [B] of bool."""

    active: Leaf


Packing: TypeAlias = SegmentIds[Leaf] | Marks[Leaf] | Sequences[Leaf] | Active[Leaf] | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Forward(Generic[Leaf]):
    """The operands of the forward pass. For the transition of a run of tokens `state` is empty."""

    inputs: dict[str, Leaf]
    state: dict[str, Leaf]
    packing: Packing[Leaf] = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Result(Generic[Leaf]):
    """The results of the forward pass: `y`, the state after it, and the states at chunk boundaries
    if they are saved, none otherwise."""

    y: Leaf
    state: dict[str, Leaf]
    states: dict[str, Leaf]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Backward(Generic[Leaf]):
    """The operands of the backward pass: the inputs, the saved states, and the cotangents of `y`
    and of the final state."""

    inputs: dict[str, Leaf]
    states: dict[str, Leaf]
    dy: Leaf
    dstate: dict[str, Leaf]
    packing: Packing[Leaf] = None


Gradients: TypeAlias = Forward[Leaf]
"""The cotangents of the inputs and of the initial state, as trees like the operands."""

Operands: TypeAlias = Forward[Leaf] | Backward[Leaf]
