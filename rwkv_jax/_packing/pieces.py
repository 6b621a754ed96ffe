"""Sequences in a row, cut into pieces of a few tokens that are computed side by side.

The pieces of a sequence are counted from its start, and its last one may end with padding. Tokens
stay where they are in the row: a piece is read as consecutive tokens of the row, of which only some
may be there, and its results are written to the places of those tokens alone.

Pieces are in groups of one or two. Of each sequence in turn come its whole groups. Where they are
of two, every other sequence may leave one piece over, which waits for the next that is left over.
Both share a group, so that a sequence wastes less than one piece. The path of states through the
pieces says which one each piece continues. Nothing of it is quadratic in the number of sequences:
the states before sequences are only read, and those after them only written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.saved import CHUNK
from rwkv_jax._packing import sequences


def most(tokens: int, count: int, length: int) -> int:
    """As many pieces as there can be, of a length, in a row of so many tokens in `count`
    sequences."""
    return (tokens + count * (length - 1)) // length


class Path(NamedTuple):
    """The way of states through pieces, for any arrays of flags.

    sequence: the sequence of each piece.
    enters: whether it starts with the state that its sequence was given.
    takes: whether it otherwise continues the state that waits, not the one of the last piece.
    gives: whether the state after it waits.
    exits: whether the state after it is that of the end of its sequence.
    """

    sequence: Array
    enters: Array
    takes: Array
    gives: Array
    exits: Array

    def reverse(self) -> "Path":
        return Path(self.sequence, self.exits, self.gives, self.takes, self.enters)


class States(NamedTuple):
    """The states on a path: of the last piece and the one that waits [B, ...], and those that all
    sequences have in the end [B, S, ...]."""

    last: Array
    waiting: Array
    done: Array


def start(given: Array) -> States:
    """Before a path, from the states that sequences were given [B, S, ...]."""
    nothing = jnp.zeros_like(given[:, 0])
    return States(nothing, nothing, given)


def enter(states: States, path: Path, given: Array) -> Array:
    """The state that one piece of each row continues."""
    own = given.at[_rows(given, -1), path.sequence].get(mode="promise_in_bounds")
    return _choose(path.enters, own, _choose(path.takes, states.waiting, states.last))


def leave(states: States, path: Path, after: Array) -> States:
    """The states after that piece, from the one after it."""
    rows = states.done.shape[1]
    place = jnp.where(path.exits, path.sequence, rows)
    return States(
        _choose(path.exits | path.gives, states.last, after),
        _choose(path.gives, after, states.waiting),
        states.done.at[_rows(after, -1), place].set(after, mode="drop", unique_indices=True),
    )


def _choose(condition: Array, x: Array, y: Array) -> Array:
    return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)


class Pieces(NamedTuple):
    """Pieces of rows [B, T], in the order of their places. G is their number.

    path: the way of states through them [B, G].
    before: how many tokens of the sequence are before each [B, G].
    start: its first token in the row [B, G].
    end: the token behind the last of its sequence, or 0 where no piece has the place [B, G].
    chunk: the chunk that it belongs to, by which states are saved [B, G].
    """

    path: Path
    before: Array
    start: Array
    end: Array
    chunk: Array

    @property
    def used(self) -> Array:
        """Whether there is such a piece [B, G]."""
        return self.start < self.end

    @property
    def opens_chunk(self) -> Array:
        """Whether the state before it is saved [B, G]."""
        return self.used & (self.before % CHUNK == 0)

    def tokens(self, length: int, count: int) -> tuple[Array, Array]:
        """The tokens [B, G, length] that pieces are read from, in a row of so many tokens, and
        whether each belongs to its piece."""
        index = self._read(length, count)[..., None] + lax.iota(jnp.int32, length)[None, None]
        there = (index >= self.start[..., None]) & (index < self.end[..., None])
        return index, there

    def cut(self, x: Array, length: int) -> Array:
        """[B, T, ...] as [B, G, length, ...]."""
        if x.shape[1] < length:
            missing = [(0, 0)] * x.ndim
            missing[1] = 0, length - x.shape[1]
            x = jnp.pad(x, missing)

        def one(row: Array, start: Array) -> Array:
            return lax.dynamic_slice_in_dim(row, start, length)

        each = jax.vmap(jax.vmap(one, in_axes=(None, 0)))
        return each(x, self._read(length, x.shape[1]))

    def put(self, x: Array, found: Array) -> Array:
        """`x` [B, T, ...] with the tokens of pieces [B, G, length, ...]."""
        count, length = found.shape[1:3]
        index, there = self.tokens(length, x.shape[1])
        nowhere = x.shape[1] + lax.iota(jnp.int32, count * length).reshape(count, length)
        index = jnp.where(there, index, nowhere)
        return x.at[_rows(x, -1, 1, 1), index].set(found, mode="drop", unique_indices=True)

    def saved(self, states: Array) -> Array:
        """The states before the chunks of pieces [B, G, ...], from those saved [B, N, ...]."""
        return states[_rows(states, -1, 1), self.chunk]

    def save(self, states: Array, found: Array) -> Array:
        """The states before chunks [B, N, ...] with those before pieces [B, G, ...]."""
        nowhere = states.shape[1] + lax.iota(jnp.int32, found.shape[1])
        place = jnp.where(self.opens_chunk, self.chunk, nowhere)
        return states.at[_rows(states, -1, 1), place].set(found, mode="drop", unique_indices=True)

    def _read(self, length: int, count: int) -> Array:
        """The first token that a piece is read from: the end of the row may be too near."""
        return jnp.clip(self.start, 0, max(count - length, 0))


def _rows(x: Array, *shape: int) -> Array:
    return lax.iota(jnp.int32, x.shape[0]).reshape(shape)


def pieces(offsets: Array, tokens: int, length: int, group: int, groups: int) -> Pieces:
    """The pieces of a length in groups of one or two, for rows with so many tokens and with offsets
    [B, Z]. `groups` is the number of places for groups."""
    chunks = sequences.layout(offsets, tokens)
    offsets = chunks.offsets
    count = -(-jnp.diff(offsets) // length)
    whole, left = count // group, count % group > 0
    rank = jnp.cumsum(left, axis=1, dtype=jnp.int32)
    waits, shares = left & (rank % 2 == 1), left & (rank % 2 == 0)
    several = whole + shares.astype(jnp.int32)
    upto = jnp.cumsum(several, axis=1)
    number = lax.broadcasted_iota(jnp.int32, count.shape, 1)
    waiting = lax.cummax(jnp.where(waits, number, 0), axis=1)

    found = sequences.find(upto, groups)
    own = jnp.minimum(found, count.shape[1] - 1)

    def of(x: Array, sequence: Array = own) -> Array:
        return jnp.take_along_axis(x, sequence, axis=1)

    place = lax.broadcasted_iota(jnp.int32, own.shape, 1)
    there = found < count.shape[1]
    nth = place - of(upto - several)
    is_whole = there & (nth < of(whole))
    # Behind all others is a group with the piece that waits last.
    is_last = (place == upto[:, -1:]) & (rank[:, -1:] % 2 == 1)
    takes = (there & ~is_whole) | is_last
    gives = is_whole & of(waits) & (nth == of(whole) - 1)

    def both(first: Array, second: Array) -> Array:
        return jnp.stack([first, second], axis=2)[:, :, :group].reshape(len(first), -1)

    nothing = jnp.zeros_like(takes)
    sequence = both(jnp.where(takes, of(waiting), own), own)
    used = both(is_whole | takes, there)
    last = of(count, sequence) - 1
    index = jnp.where(both(is_whole, is_whole), both(nth * group, nth * group + 1), last)
    before = jnp.where(used, index * length, 0)
    path = Path(
        sequence,
        used & (index == 0),
        both(takes, nothing),
        both(nothing, gives),
        used & (index == last),
    )
    return Pieces(
        path,
        before,
        of(offsets, sequence) + before,
        jnp.where(used, of(offsets[:, 1:], sequence), 0),
        jnp.minimum(of(chunks.first, sequence) + before // CHUNK, chunks.owner.shape[1] - 1),
    )
