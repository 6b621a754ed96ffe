"""The operands and results of a call, slab by slab, as links.

Both classes have the same methods. `LinksOfRows` is for rows, with or without segments.
`LinksOfSequences` is for `cu_seqlens`, where the state has the axis S, and each sequence has chunks
of its own, of which the last one may end with padding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator.call import Arrays, Marks, Packing, Sequences
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import by_chunk, segments
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.slabs import Carry, Sizes, Slabs, length_of_chunks


class Path(NamedTuple):
    """The way of states through chunks [N, B].

    sequence: the sequence of each chunk.
    enters: whether it starts with the state that its sequence was given.
    exits: whether the state after it is that of the end of its sequence.
    """

    sequence: Array
    enters: Array
    exits: Array

    def reverse(self) -> "Path":
        return Path(self.sequence, self.exits, self.enters)


class Carried(NamedTuple):
    """The states on a path: the one after the last chunk [B, ...], and those that all sequences
    have in the end [B, S, ...]."""

    last: Array
    done: Array


class LinksOfRows:
    """The links of rows, which are consecutive tokens from the start of each row.

    shared: the inputs that all tokens share, as arrays [N, R, B, H, T, K].
    """

    def __init__(
        self, signature: Signature, sizes: Sizes, inputs: Arrays, packing: Packing
    ) -> None:
        axes = signature.sizes(inputs)
        self._tokens = axes["T"]
        self._marks = packing.marks if isinstance(packing, Marks) else None
        self._per_token = {name: inputs[name] for name in signature.per_token}
        self.shared = {name: inputs[name][None, None, :, :, None] for name in signature.shared}
        self.slabs = Slabs(
            sizes, self._places(packing), length_of_chunks(self._tokens), axes["B"] * axes["H"]
        )

    def _places(self, packing: Packing) -> int:
        """The number of tokens that links have places for."""
        return self._tokens

    def run(
        self, body: Callable[[Any, Carry], Carry], carry: Carry, *, reverse: bool = False
    ) -> Carry:
        """`body(number, carry)` of one slab after another."""
        return self.slabs.run(body, carry, reverse=reverse)

    def inputs(self, number: Any) -> tuple[Arrays, Arrays, Tokens]:
        """The inputs of the tokens of a slab, those that all tokens share, and the tokens."""
        per_token = {name: self.at(number, x) for name, x in self._per_token.items()}
        return per_token, self.shared, self.tokens(number)

    def tokens(self, number: Any) -> Tokens:
        return self.slabs.tokens(number, self._marks)

    def at(self, number: Any, x: Array) -> Array:
        """The tokens of a slab, from `x` [B, T, ...]."""
        return self.slabs.cut(number, self.slabs.at(number, x), self._marks)

    def room(self, x: Array) -> Array:
        """Zeros for what `put` writes, which is like `x` [B, T, ...]."""
        return self.slabs.room(x)

    def put(self, number: Any, room: Array, found: Array) -> Array:
        """`room` with the tokens of a slab."""
        return self.slabs.put(number, room, found)

    def whole(self, room: Array) -> Array:
        """[B, T, ...] from what has been `put`."""
        return room[:, : self._tokens]

    def room_for_states(self, state: Array, dtype: Any) -> Array:
        """Zeros for what `save` writes: a state before each chunk."""
        shape = (state.shape[0], self.slabs.chunks, *state.shape[1:])
        return jnp.zeros_like(state, dtype, shape=shape)

    def save(self, number: Any, room: Array, states: Array) -> Array:
        """`room` with the states before the chunks of a slab [N, B, ...]."""
        return self.slabs.put_chunks(number, room, states.astype(room.dtype))

    def states(self, room: Array) -> Array:
        """The states before chunks [B, N, ...] from what `save` has written."""
        return room[:, : self.slabs.used]

    def saved(self, number: Any, states: Array) -> Array:
        """The states before the chunks of a slab [N, B, ...]."""
        return self.slabs.chunks_at(number, states)

    def path(self, number: Any) -> Path | None:
        """The way of the states through the chunks of a slab; None if each row has one state."""
        return None

    def start(self, given: Array) -> Any:
        """What chains carry, from the states that they start with."""
        return given

    def end(self, carried: Any) -> Array:
        """The states that chains end with."""
        return carried


class LinksOfSequences(LinksOfRows):
    """The links of sequences.

    At the first chunk of a sequence the chain continues from the initial state of that sequence.
    The states before all chunks are kept anyway, and the final state of a sequence is the one
    before the chunk after its last. So a chunk reads and writes no state that a chunk of a row does
    not, however many sequences there are.
    """

    def __init__(
        self, signature: Signature, sizes: Sizes, inputs: Arrays, packing: Sequences
    ) -> None:
        self._chunks = by_chunk.chunks(packing.offsets, signature.sizes(inputs)["T"])
        super().__init__(signature, sizes, inputs, packing)
        length = self.slabs.length
        self._marks = by_chunk.concat_chunks(self._chunks.marks, length, segments.PADDING)
        self._from = by_chunk.concat_chunks(self._chunks.tokens, length, 0)
        needed = -(-self._tokens // length)
        self._asks = self.slabs.used > (1 + sizes.spare) * needed
        first, owner, used = self._chunks.layout[2:]
        number = jax.lax.broadcasted_iota(jnp.int32, owner.shape, 1)
        begin, end = (jnp.take_along_axis(x, owner, axis=1) for x in (first, first[:, 1:]))
        self._path = Path(owner, used & (number == begin), used & (number == end - 1))

    def _places(self, packing: Packing) -> int:
        return len(self._chunks.tokens) * length_of_chunks(self._tokens)

    def run(
        self, body: Callable[[Any, Carry], Carry], carry: Carry, *, reverse: bool = False
    ) -> Carry:
        used = jnp.max(self._chunks.layout.first[:, -1]) if self._asks else None
        return self.slabs.run(body, carry, used=used, reverse=reverse)

    def tokens(self, number: Any) -> Tokens:
        return super().tokens(number)._replace(segment=None)  # a chunk has one sequence

    def at(self, number: Any, x: Array) -> Array:
        tokens = self.slabs.at(number, self._from)
        return self.slabs.cut(number, x[jnp.arange(len(x))[:, None], tokens], self._marks)

    def whole(self, room: Array) -> Array:
        room = room.reshape(len(room), -1, self.slabs.length, *room.shape[2:])
        return self._chunks.join(jnp.moveaxis(room, 1, 0))

    def room_for_states(self, state: Array, dtype: Any) -> Array:
        return super().room_for_states(state[:, 0], dtype)

    def path(self, number: Any) -> Path | None:
        return jax.tree.map(lambda x: self.slabs.chunks_at(number, x), self._path)

    def start(self, given: Array) -> Any:
        return Carried(jnp.zeros_like(given[:, 0]), given)

    def end(self, carried: Any) -> Array:
        return carried.done


def links(signature: Signature, sizes: Sizes, inputs: Arrays, packing: Packing) -> LinksOfRows:
    """The links of a call."""
    if isinstance(packing, Sequences):
        return LinksOfSequences(signature, sizes, inputs, packing)
    return LinksOfRows(signature, sizes, inputs, packing)
