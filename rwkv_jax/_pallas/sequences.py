"""The tiles of sequences in a row.

Each sequence has chunks of its own, in the order in which states are saved, and each chunk has
TILES tiles. So a tile has tokens of one sequence, and the kernels of tiles and of chunks need not
know of sequences. A walk along each sequence starts with its state and ends with its state.

Inputs stay where they are: a tile takes the TILE tokens of the row from its first one on, or the
last TILE tokens of the row, and those that are not its own are not there. What kernels prepare and
write is in the order of tiles.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._packing import by_chunk
from rwkv_jax._pallas.algebra import TILE, TILES
from rwkv_jax._pallas.lowering import END, FIRST, Operands


class Layout(NamedTuple):
    """Where tokens are in tiles. T in brackets counts the tokens of all tiles, not of a row.

    begin: the first token that a tile takes, -1 if there is no such tile [B, J].
    there: 1 for each token that is of the sequence of its tile, or 0 [B, (T)].
    first, end: the first tile of each sequence, and the place behind its last [B, S].
    used: how many tiles of each chunk there are [B, N].
    place: where the tokens of the row are in tiles [B, T].
    owned: which of them are of a sequence [B, T].
    """

    begin: Array
    there: Array
    first: Array
    end: Array
    used: Array
    place: Array
    owned: Array

    def spans(self, *, of_chunks: bool) -> Operands:
        """The spans of tiles that walks take, of each sequence or of each chunk."""
        if of_chunks:
            return {END: ("BN1", self.used[:, :, None])}
        return {FIRST: ("BS1", self.first[:, :, None]), END: ("BS1", self.end[:, :, None])}

    def join(self, x: Array) -> Array:
        """The tokens of rows from those of tiles, with zeros for tokens of no sequence."""
        row = lax.broadcasted_iota(jnp.int32, self.place.shape, 0)
        owned = jnp.expand_dims(self.owned, range(2, x.ndim))
        return jnp.where(owned, x[row, self.place], jnp.zeros_like(x, shape=()))


def layout(offsets: Array, tokens: int) -> Layout:
    """The layout of rows with so many tokens and with offsets [B, Z]."""
    chunks, last = by_chunk.chunks(offsets, tokens), max(tokens, TILE) - TILE
    tiles = (*chunks.start.shape, TILES)
    start = chunks.start[:, :, None] + TILE * lax.broadcasted_iota(jnp.int32, tiles, 2)
    end = jnp.broadcast_to(chunks.end[:, :, None], tiles)
    begin = jnp.clip(start, 0, last)
    token = begin[..., None] + lax.broadcasted_iota(jnp.int32, (*tiles, TILE), 3)
    there = (start[..., None] <= token) & (token < end[..., None])
    begin = jnp.where(start < end, begin, -1)

    first = chunks.layout.first * TILES
    lengths = jnp.diff(chunks.layout.offsets, axis=1)
    chunk, offset = chunks.place
    of_row = lax.broadcasted_iota(jnp.int32, chunk.shape, 1)
    tile = chunk * TILES + offset // TILE
    place = tile * TILE + of_row - jnp.minimum(of_row - offset % TILE, last)
    batch = len(offsets)
    return Layout(
        begin.reshape(batch, -1),
        there.reshape(batch, -1).astype(jnp.int32),
        first[:, :-1],
        first[:, :-1] + -(-lengths // TILE),
        jnp.sum(begin >= 0, axis=-1, dtype=jnp.int32),
        place,
        chunks.there,
    )
