"""The operands and results of a call, slab by slab, as links.

Both classes have the same methods. `LinksOfRows` is for rows, with or without segments.
`LinksOfSequences` is for `cu_seqlens`, where the state has the axis S, and chains carry states on
the path that `rwkv_jax._packing.pieces` describes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator.call import Arrays, Marks, Packing, Sequences
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import pieces, sequences
from rwkv_jax._packing.pieces import Path, Pieces
from rwkv_jax._portable.algebra import Tokens
from rwkv_jax._portable.slabs import LINK, Carry, Sizes, Slabs, length_of_chunks


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
        self._timed = {name: inputs[name] for name in signature.timed}
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
        timed = {name: self.at(number, x) for name, x in self._timed.items()}
        return timed, self.shared, self.tokens(number)

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
        shape = (len(state), self.slabs.chunks, *state.shape[1:])
        return jnp.zeros_like(state, dtype, shape=shape)

    def save(self, number: Any, room: Array, states: Array) -> Array:
        """`room` with the states before chunks, from those of a slab: before its chunks
        [N, 1, B, ...], or before its links [N, R, B, ...] where they are on a path."""
        return self.slabs.put_chunks(number, room, states[:, 0].astype(room.dtype))

    def states(self, room: Array) -> Array:
        """The states before chunks [B, N, ...] from what `save` has written."""
        return room[:, : self.slabs.used]

    def saved(self, number: Any, states: Array) -> tuple[Array, Array | None]:
        """The states before the chunks of links [N, 1 or R, B, ...], and which links do not
        continue the link before them [N, R, B]; None if that is the first of each chunk."""
        return self.slabs.chunks_at(number, states)[:, None], None

    def path(self, number: Any) -> Path | None:
        """The way of the states through the links of a slab [N, R, B]; None if each row has one
        state."""
        return None

    def start(self, given: Array) -> Any:
        """What chains carry, from the states that they start with."""
        return given

    def end(self, carried: Any) -> Array:
        """The states that chains end with."""
        return carried


class LinksOfSequences(LinksOfRows):
    """The links of sequences, each with tokens of one sequence. Both links of a chunk are next to
    each other, or a link that ends its sequence is next to another one that does."""

    def __init__(
        self, signature: Signature, sizes: Sizes, inputs: Arrays, packing: Sequences
    ) -> None:
        super().__init__(signature, sizes, inputs, packing)
        self._link = min(LINK, self.slabs.length)
        self._per_chunk = self.slabs.length // self._link
        self._chunks = sequences.chunks(packing.offsets, self._tokens)
        self._pieces = pieces.pieces(
            *(packing.offsets, self._tokens, self._link, self._per_chunk, self.slabs.chunks)
        )

    def _places(self, packing: Packing) -> int:
        assert isinstance(packing, Sequences)
        link = min(LINK, length_of_chunks(self._tokens))
        return link * pieces.most(self._tokens, packing.offsets.shape[1] - 1, link)

    def run(
        self, body: Callable[[Any, Carry], Carry], carry: Carry, *, reverse: bool = False
    ) -> Carry:
        used = self._pieces.used[:, :: self._per_chunk]
        used = jnp.max(jnp.sum(used, axis=1, dtype=jnp.int32))
        return self.slabs.run(body, carry, used=used, reverse=reverse)

    def _at(self, number: Any) -> Pieces:
        """The pieces of a slab."""

        def one(x: Array) -> Array:
            x = self.slabs.chunks_at(number, x.reshape(len(x), -1, self._per_chunk))
            return jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1)

        return jax.tree.map(one, self._pieces)

    def _of_links(self, x: Array) -> Array:
        """[B, G, ...] as [N, R, B, ...]."""
        x = x.reshape(len(x), -1, self._per_chunk, *x.shape[2:])
        return jnp.moveaxis(x, 0, 2)

    def tokens(self, number: Any) -> Tokens:
        _, there = self._at(number).tokens(self._link, self._tokens)
        return Tokens(self._of_links(there)[:, :, :, None])

    def at(self, number: Any, x: Array) -> Array:
        here = self._at(number)
        _, there = here.tokens(self._link, self._tokens)
        found = here.cut(x, self._link)
        found = jnp.where(there[..., None, None], found, jnp.zeros_like(found))
        return self.slabs.links(found.reshape(len(x), -1, *x.shape[2:]))

    def room(self, x: Array) -> Array:
        return jnp.zeros_like(x)

    def put(self, number: Any, room: Array, found: Array) -> Array:
        rows = self.slabs.rows(found)
        rows = rows.reshape(len(rows), -1, self._link, *rows.shape[2:])
        return self._at(number).put(room, rows)

    def room_for_states(self, state: Array, dtype: Any) -> Array:
        shape = (len(state), self._chunks, *state.shape[2:])
        return jnp.zeros_like(state, dtype, shape=shape)

    def save(self, number: Any, room: Array, states: Array) -> Array:
        found = jnp.moveaxis(states, 2, 0)
        found = found.reshape(len(found), -1, *found.shape[3:]).astype(room.dtype)
        return self._at(number).save(room, found)

    def states(self, room: Array) -> Array:
        return room

    def saved(self, number: Any, states: Array) -> tuple[Array, Array | None]:
        here = self._at(number)
        return self._of_links(here.saved(states)), self._of_links(here.opens_chunk)

    def path(self, number: Any) -> Path | None:
        return jax.tree.map(self._of_links, self._at(number).path)

    def start(self, given: Array) -> Any:
        return pieces.start(given)

    def end(self, carried: Any) -> Array:
        return carried.done


def links(signature: Signature, sizes: Sizes, inputs: Arrays, packing: Packing) -> LinksOfRows:
    """The links of a call."""
    if isinstance(packing, Sequences):
        return LinksOfSequences(signature, sizes, inputs, packing)
    return LinksOfRows(signature, sizes, inputs, packing)
