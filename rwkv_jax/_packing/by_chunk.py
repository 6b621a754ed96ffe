"""Sequences in a row for an implementation that takes none: one chunk after another.

Each chunk continues from the state of its sequence and replaces it. In the backward pass, from the
last chunk to the first, the chunks do the same with the cotangent of the state. The last chunk of a
sequence ends in padding. (Longer runs of tokens would be fewer, but their padding costs more than
that saves.)
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    CHUNK,
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Packing,
    Result,
    Sequences,
)
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments, sequences

States = TypeVar("States", Array, Arrays)


class Chunks(NamedTuple):
    """The chunks of rows [B, T] in the order of their sequences; L is the length of a chunk.

    layout: where sequences and chunks are in the rows.
    sequence: the sequence of each chunk [N, B].
    start: the first token of each chunk [B, N].
    end: the end of its sequence, 0 if there is no such chunk [B, N].
    tokens: where the tokens of a chunk are in the row [N, B, L].
    marks: the marks of these tokens [N, B, L].
    place: the chunk of each token of the row, and its place there, [B, T] each.
    there: whether each token of the row belongs to a sequence [B, T].
    """

    layout: sequences.Layout
    sequence: Array
    start: Array
    end: Array
    tokens: Array
    marks: Array
    place: tuple[Array, Array]
    there: Array

    def cut(self, x: Array) -> Array:
        """[B, T, ...] as [N, B, L, ...]."""
        return x[_rows(x, 1, -1, 1), self.tokens]

    def join(self, x: Array) -> Array:
        """[N, B, L, ...] as [B, T, ...], with zeros for tokens of no sequence."""
        chunk, offset = self.place
        x = x[chunk, lax.broadcasted_iota(jnp.int32, chunk.shape, 0), offset]
        there = self.there.reshape(*self.there.shape, *[1] * (x.ndim - 2))
        return jnp.where(there, x, jnp.zeros_like(x))


def concat_chunks(x: Array, length: int, padding: Any) -> Array:
    """[N, B, L, ...] as [B, N * length, ...], where each chunk is padded to `length`."""
    missing = [(0, 0)] * x.ndim
    missing[2] = 0, length - x.shape[2]
    x = jnp.moveaxis(jnp.pad(x, missing, constant_values=padding), 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])


def _rows(x: Array, *shape: int) -> Array:
    return lax.iota(jnp.int32, x.shape[0]).reshape(shape)


def chunks(offsets: Array, tokens: int, length: int = CHUNK) -> Chunks:
    """The chunks of rows with so many tokens and with offsets [B, Z]."""
    count = offsets.shape[1] - 1
    layout = sequences.layout(offsets, tokens, length)
    offsets, length, first, sequence, used = layout
    most = sequence.shape[1]

    def of(numbers: Array, sequence: Array) -> Array:
        return jnp.take_along_axis(numbers, sequence, axis=1)

    number = lax.broadcasted_iota(jnp.int32, sequence.shape, 1)
    start = of(offsets, sequence) + (number - of(first, sequence)) * length
    end = jnp.where(used, of(offsets, sequence + 1), 0)
    index = start[..., None] + lax.iota(jnp.int32, length)[None, None]
    marks = jnp.where(
        index < end[..., None], jnp.uint8(segments.CONTINUES), jnp.uint8(segments.PADDING)
    )

    own = sequences.find(offsets[:, 1:], tokens)
    of_row = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    there = (offsets[:, :1] <= of_row) & (own < count)
    own = jnp.minimum(own, count - 1)
    before = of_row - of(offsets, own)
    chunk = jnp.clip(of(first, own) + before // length, 0, most - 1)
    return Chunks(
        layout,
        sequence.T,
        start,
        end,
        jnp.moveaxis(jnp.clip(index, 0, tokens - 1), 0, 1),
        jnp.moveaxis(marks, 0, 1),
        (chunk, jnp.where(there, before % length, 0)),
        there,
    )


ForwardFn: TypeAlias = Callable[[Forward], Result]
BackwardFn: TypeAlias = Callable[[Backward], Gradients]


def forward(signature: Signature, one: ForwardFn, operands: Forward) -> Result:
    """The forward pass, by that of an implementation on one chunk with marks."""
    cut, of_tokens, shared = _cut(signature, operands.inputs, operands.packing)

    def body(states: Arrays, chunk: Any) -> tuple[Arrays, Any]:
        per_token, sequence, marks = chunk
        before = at(states, sequence)
        result = one(Forward({**per_token, **shared}, before, Marks(marks)))
        return replaced(states, sequence, result.state), (result.y, result.states)

    states, (y, saved) = lax.scan(body, operands.state, (of_tokens, cut.sequence, cut.marks))
    # [N, B, 1, ...] as [B, N, ...].
    saved = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), saved)
    return Result(cut.join(y), states, saved)


def backward(signature: Signature, one: BackwardFn, operands: Backward) -> Gradients:
    """The backward pass, by that of an implementation on one chunk with marks."""
    cut, of_tokens, shared = _cut(signature, operands.inputs, operands.packing)
    saved = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], operands.states)

    def body(sums: tuple[Arrays, Arrays], chunk: Any) -> tuple[tuple[Arrays, Arrays], Arrays]:
        dshared, dstates = sums
        per_token, sequence, marks, dy, saved = chunk
        after = at(dstates, sequence)
        found = one(Backward({**per_token, **shared}, saved, dy, after, Marks(marks)))
        d_per_token = {name: found.inputs[name] for name in per_token}
        dshared = {name: dx + found.inputs[name] for name, dx in dshared.items()}
        return (dshared, replaced(dstates, sequence, found.state)), d_per_token

    xs = of_tokens, cut.sequence, cut.marks, cut.cut(operands.dy), saved
    zeros = jax.tree.map(jnp.zeros_like, shared)
    (dshared, dstates), d_per_token = lax.scan(body, (zeros, operands.dstate), xs, reverse=True)
    return Gradients(jax.tree.map(cut.join, d_per_token) | dshared, dstates)


def _cut(signature: Signature, inputs: Arrays, packing: Packing) -> tuple[Chunks, Arrays, Arrays]:
    """The chunks of a call, the inputs of tokens cut into them, and those that all tokens share."""
    assert isinstance(packing, Sequences)
    found = chunks(packing.offsets, inputs[signature.per_token[0]].shape[1])
    per_token = {name: found.cut(inputs[name]) for name in signature.per_token}
    return found, per_token, {name: inputs[name] for name in signature.shared}


def at(states: States, sequence: Array) -> States:
    """Of states [B, S, ...] the state of one sequence in each row [B]."""
    return jax.tree.map(lambda x: x[_rows(x, -1), sequence], states)


def replaced(states: States, sequence: Array, after: States) -> States:
    """The states with another state of that sequence."""
    return jax.tree.map(lambda x, y: x.at[_rows(x, -1), sequence].set(y), states, after)
