"""The operands and results of a call, chunk group by chunk group: some chunks of all rows at a
time, cut into sub-chunks.

N is the number of chunks of a chunk group, R the number of sub-chunks of a chunk, and T the number
of tokens of a sub-chunk: arrays of tokens [B, ..., H, K] become [N, R, B, H, T, K].

`SubChunksOfRows` is for rows, with or without segments. `SubChunksOfSequences` is for `cu_seqlens`,
where the state has the axis S, and each sequence has chunks of its own, of which the last one may
end with padding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK, Arrays, Marks, Packing, Sequences
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import by_chunk, segments
from rwkv_jax._portable.algebra import Tokens

SUB_CHUNK = 32
"""Tokens of a sub-chunk. With more of them, there is more work on pairs of tokens, and with fewer a
longer chain."""


class Sizes(NamedTuple):
    """How large chunk groups are: of so many tokens times heads, or of more if there would be too
    many.

    sub_chunk: how many tokens a sub-chunk has, if its chunk has as many.
    spare: how many chunk groups may be empty, relative to those that cannot be, before the device
      is asked how many there are.
    """

    sub_chunk: int
    tokens: int
    most: int
    spare: int


ON_CPU = Sizes(SUB_CHUNK, 512, 1 << 30, 0)
"""One chunk, unless there are few heads: what is computed of a chunk group stays in the caches."""

ELSEWHERE = Sizes(SUB_CHUNK, 1 << 12, 8, 1)
"""So large that a chunk group has 128 sub-chunks, about one for each multiprocessor of a large GPU,
and so small that its memory is a part of that of the call. The host waits for each answer of a GPU,
which meanwhile has nothing to do."""

LONG_SUB_CHUNKS = ELSEWHERE._replace(sub_chunk=2 * SUB_CHUNK)
"""Half as many sub-chunks where decays are bounded and products rounded: all pairs of tokens of a
sub-chunk are one product there, and the chain is shorter."""

Carry = TypeVar("Carry")


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


class SubChunksOfRows:
    """The sub-chunks of rows, which are consecutive tokens from the start of each row.

    count: the number of chunk groups.
    used: the number of chunks that have tokens.
    chunks: the number of chunks of all chunk groups, also of those behind the end.
    shared: the inputs that all tokens share, as arrays [N, R, B, H, T, K].
    """

    def __init__(
        self,
        signature: Signature,
        sizes: Sizes,
        inputs: Arrays,
        packing: Packing,
        places: int | None = None,
    ) -> None:
        """`places` is the number of tokens that sub-chunks have places for, those of a row if
        None."""
        axes = signature.sizes(inputs)
        self._tokens, self._length = axes["T"], length_of_chunks(axes["T"])
        self._places = axes["T"] if places is None else places
        self._sub_chunk = min(sizes.sub_chunk, self._length)
        self._marks = packing.marks if isinstance(packing, Marks) else None
        self._per_token = {name: inputs[name] for name in signature.per_token}
        self.shared = {name: inputs[name][None, None, :, :, None] for name in signature.shared}
        self.used = -(-self._places // self._length)
        heads = axes["B"] * axes["H"]
        enough = self._places * heads // sizes.tokens if isinstance(heads, int) else self.used
        self._each = chunks_of_group(self.used, min(sizes.most, enough))
        self.count = -(-self.used // max(self._each, 1))
        self.chunks = self.count * self._each

    def run(
        self, body: Callable[[Any, Carry], Carry], carry: Carry, *, reverse: bool = False
    ) -> Carry:
        """`body(number, carry)` of one chunk group after another."""
        if self.count == 1:
            return body(0, carry)
        count = self._count_used()
        one = (lambda n, carry: body(count - 1 - n, carry)) if reverse else body
        return lax.fori_loop(0, count, one, carry)

    def _count_used(self) -> Any:
        """The number of chunk groups, a number that perhaps only the device knows."""
        return self.count

    # Tokens.

    def inputs(self, number: Any) -> tuple[Arrays, Arrays, Tokens]:
        """The inputs of the tokens of a chunk group, those that all tokens share, and the
        tokens."""
        per_token = {name: self.at(number, x) for name, x in self._per_token.items()}
        return per_token, self.shared, self.tokens(number)

    def tokens(self, number: Any) -> Tokens:
        starts, marks = self._marks is not None, self._marks
        if marks is None:
            if self._tokens == self.chunks * self._length:
                return Tokens()
            marks = jnp.zeros((1, self._tokens), jnp.uint8)
        mine = self._sub_chunks(self._marks_at(number, marks)[:, :, None, None])[..., 0]
        segment = jnp.cumsum(mine == segments.STARTS, axis=-1, dtype=jnp.int32) if starts else None
        return Tokens(mine != segments.PADDING, segment)

    def at(self, number: Any, x: Array) -> Array:
        """The tokens of a chunk group, with zeros for padding, from `x` [B, T, ...]."""
        return self._cleared(number, self._slice(number, _filled(x, self.chunks * self._length)))

    def _cleared(self, number: Any, x: Array) -> Array:
        if self._marks is not None:
            (x,) = segments.cleared(self._marks_at(number, self._marks), [x])
        return self._sub_chunks(x)

    def _marks_at(self, number: Any, marks: Array) -> Array:
        missing = self.chunks * self._length - marks.shape[1]
        marks = jnp.pad(marks, ((0, 0), (0, missing)), constant_values=segments.PADDING)
        return self._slice(number, marks)

    def _slice(self, number: Any, x: Array) -> Array:
        size = self._each * self._length
        return lax.dynamic_slice_in_dim(x, number * size, size, 1)

    def _sub_chunks(self, x: Array) -> Array:
        """The tokens of a chunk group [B, ...] as sub-chunks."""
        batch, _, heads, size = x.shape
        several = self._length // self._sub_chunk
        x = x.reshape(batch, self._each, several, self._sub_chunk, heads, size)
        return x.transpose(1, 2, 0, 4, 3, 5)

    def room(self, x: Array) -> Array:
        """Zeros for what `put` writes, which is like `x` [B, T, ...]."""
        return jnp.zeros_like(x, shape=(x.shape[0], self.chunks * self._length, *x.shape[2:]))

    def put(self, number: Any, room: Array, sub_chunks: Array) -> Array:
        """`room` with the tokens of a chunk group."""
        chunks, several, batch, heads, length, size = sub_chunks.shape
        rows = sub_chunks.transpose(2, 0, 1, 4, 3, 5)
        rows = rows.reshape(batch, chunks * several * length, heads, size)
        start = number * self._each * self._length
        return lax.dynamic_update_slice_in_dim(room, rows, start, 1)

    def whole(self, room: Array) -> Array:
        """[B, T, ...] from what has been `put`."""
        return room[:, : self._tokens]

    # States.

    def room_for_states(self, state: Array, dtype: Any) -> Array:
        """Zeros for what `save` writes: a state before each chunk."""
        shape = (state.shape[0], self.chunks, *state.shape[1:])
        return jnp.zeros_like(state, dtype, shape=shape)

    def save(self, number: Any, room: Array, states: Array) -> Array:
        """`room` with the states before the chunks of a chunk group [N, B, ...]."""
        states = jnp.moveaxis(states.astype(room.dtype), 0, 1)
        return lax.dynamic_update_slice_in_dim(room, states, number * self._each, 1)

    def states(self, room: Array) -> Array:
        """The states before chunks [B, N, ...] from what `save` has written."""
        return room[:, : self.used]

    def of_chunks(self, number: Any, x: Array) -> Array:
        """Of what each chunk has [B, ...], that of the chunks of a chunk group [N, B, ...]."""
        x = _filled(x, self.chunks)
        return jnp.moveaxis(lax.dynamic_slice_in_dim(x, number * self._each, self._each, 1), 1, 0)

    def path(self, number: Any) -> Path | None:
        """The way of the states through the chunks of a chunk group; None if each row has one
        state."""
        return None

    def start(self, given: Array) -> Any:
        """What chains carry, from the states that they start with."""
        return given

    def end(self, carried: Any) -> Array:
        """The states that chains end with."""
        return carried


class SubChunksOfSequences(SubChunksOfRows):
    """The sub-chunks of sequences.

    At the first chunk of a sequence the chain continues from the initial state of that sequence.
    The states before all chunks are kept anyway, and the final state of a sequence is the one
    before the chunk after its last. So a chunk reads and writes no state that a chunk of a row does
    not, however many sequences there are.
    """

    def __init__(
        self, signature: Signature, sizes: Sizes, inputs: Arrays, packing: Sequences
    ) -> None:
        tokens = signature.sizes(inputs)["T"]
        self._of_sequences, length = (
            by_chunk.chunks(packing.offsets, tokens),
            length_of_chunks(tokens),
        )
        places = len(self._of_sequences.tokens) * length
        super().__init__(signature, sizes, inputs, packing, places)
        marks = self._of_sequences.marks
        self._marks = by_chunk.concat_chunks(marks, length, segments.PADDING)
        self._from = by_chunk.concat_chunks(self._of_sequences.tokens, length, 0)
        self._asks = self.used > (1 + sizes.spare) * -(-tokens // length)
        first, owner, used = self._of_sequences.layout[2:]
        number = lax.broadcasted_iota(jnp.int32, owner.shape, 1)
        begin, end = (jnp.take_along_axis(x, owner, axis=1) for x in (first, first[:, 1:]))
        self._path = Path(owner, used & (number == begin), used & (number == end - 1))

    def _count_used(self) -> Any:
        if not self._asks:
            return self.count
        return -(-jnp.max(self._of_sequences.layout.first[:, -1]) // self._each)

    def tokens(self, number: Any) -> Tokens:
        return super().tokens(number)._replace(segment=None)  # a chunk has one sequence

    def at(self, number: Any, x: Array) -> Array:
        tokens = self._slice(number, _filled(self._from, self.chunks * self._length))
        return self._cleared(number, x[jnp.arange(len(x))[:, None], tokens])

    def whole(self, room: Array) -> Array:
        room = room.reshape(len(room), -1, self._length, *room.shape[2:])
        return self._of_sequences.join(jnp.moveaxis(room, 1, 0))

    def room_for_states(self, state: Array, dtype: Any) -> Array:
        return super().room_for_states(state[:, 0], dtype)

    def path(self, number: Any) -> Path | None:
        return jax.tree.map(lambda x: self.of_chunks(number, x), self._path)

    def start(self, given: Array) -> Any:
        return Carried(jnp.zeros_like(given[:, 0]), given)

    def end(self, carried: Any) -> Array:
        return carried.done


def sub_chunks(
    signature: Signature, sizes: Sizes, inputs: Arrays, packing: Packing
) -> SubChunksOfRows:
    """The sub-chunks of a call."""
    if isinstance(packing, Sequences):
        return SubChunksOfSequences(signature, sizes, inputs, packing)
    return SubChunksOfRows(signature, sizes, inputs, packing)


def length_of_chunks(tokens: int) -> int:
    """CHUNK, or the next power of two where rows are shorter."""
    return min(CHUNK, 1 << max(tokens - 1, 0).bit_length())


def chunks_of_group(chunks: int, groups: int) -> int:
    """The number of chunks of a chunk group, for at least so many chunk groups, and half as many at
    the least. If possible it divides the number of all chunks, since filling up the last chunk
    group copies every operand."""
    most = -(-chunks // max(min(groups, chunks), 1))
    return next((n for n in range(most, most // 2, -1) if chunks % n == 0), most)


def _filled(x: Array, count: int) -> Array:
    """`x` [B, ...] with zeros up to so many entries of the second axis."""
    missing = [(0, 0)] * x.ndim
    missing[1] = 0, count - x.shape[1]
    return jnp.pad(x, missing)
