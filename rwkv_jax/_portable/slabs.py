"""Slabs: some chunks of all rows at a time, cut into links.

N is the number of chunks of a slab, R the number of links of a chunk, and T the number of tokens of
a link: arrays of tokens [B, ..., H, K] become [N, R, B, H, T, K].
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK
from rwkv_jax._packing import segments
from rwkv_jax._portable.algebra import Tokens

LINK = 32
"""Tokens of a link. With more of them, there is more work on pairs of tokens, and with fewer a
longer chain."""


class Sizes(NamedTuple):
    """How large slabs are: of so many tokens times heads, or of more if there would be too many.

    link: how many tokens a link has, if its chunk has as many.
    spare: how many slabs may be empty, relative to those that cannot be, before the device is asked
      how many there are.
    """

    link: int
    tokens: int
    most: int
    spare: int


ON_CPU = Sizes(LINK, 512, 1 << 30, 0)
"""One chunk, unless there are few heads: what is computed of a slab stays in the caches."""

ELSEWHERE = Sizes(LINK, 1 << 12, 8, 1)
"""So large that a slab has 128 links, about one for each multiprocessor of a large GPU, and so
small that its memory is a part of that of the call. The host waits for each answer of a GPU, which
meanwhile has nothing to do."""

LONG_LINKS = ELSEWHERE._replace(link=2 * LINK)
"""Half as many links where decays are bounded and products rounded: all pairs of tokens of a link
are one product there, and the chain is shorter."""

Carry = TypeVar("Carry")


def length_of_chunks(tokens: int) -> int:
    """CHUNK, or the next power of two where rows are shorter."""
    return min(CHUNK, 1 << max(tokens - 1, 0).bit_length())


class Slabs:
    """The slabs of rows of `tokens` tokens in chunks of `length`, with `heads` rows times heads.

    count: the number of slabs.
    used: the number of chunks that have tokens.
    chunks: the number of chunks of all slabs, also of those behind the end.
    """

    def __init__(self, sizes: Sizes, tokens: int, length: int, heads: int) -> None:
        self.length, self._tokens, self._link = length, tokens, min(sizes.link, length)
        self.used = -(-tokens // length)
        enough = tokens * heads // sizes.tokens if isinstance(heads, int) else self.used
        most = min(sizes.most, enough, self.used)
        self._each = _evenly(self.used, -(-self.used // max(most, 1)))
        self.count = -(-self.used // max(self._each, 1))
        self.chunks = self.count * self._each

    def run(
        self,
        body: Callable[[Any, Carry], Carry],
        carry: Carry,
        *,
        used: Array | None = None,
        reverse: bool = False,
    ) -> Carry:
        """`body(number, carry)` of one slab after another, as many as the first `used` chunks are
        in where only the device knows that number."""
        if self.count == 1:
            return body(0, carry)
        count = self.count if used is None else -(-used // self._each)
        one = (lambda n, carry: body(count - 1 - n, carry)) if reverse else body
        return lax.fori_loop(0, count, one, carry)

    def chunks_at(self, number: Any, x: Array) -> Array:
        """The chunks of a slab [N, B, ...] from those of all slabs [B, ...]."""
        x = _filled(x, self.chunks)
        return jnp.moveaxis(lax.dynamic_slice_in_dim(x, number * self._each, self._each, 1), 1, 0)

    def put_chunks(self, number: Any, x: Array, found: Array) -> Array:
        """The inverse of `chunks_at`, in an array that has chunks of all slabs."""
        found = jnp.moveaxis(found, 0, 1)
        return lax.dynamic_update_slice_in_dim(x, found, number * self._each, 1)

    def at(self, number: Any, x: Array) -> Array:
        """The tokens of a slab [B, ...] from those of all slabs."""
        return self._slice(number, _filled(x, self.chunks * self.length))

    def cut(self, number: Any, x: Array, marks: Array | None) -> Array:
        """The tokens of a slab as links, with zeros for padding."""
        if marks is not None:
            (x,) = segments.cleared(self._slice(number, self._padded(marks)), [x])
        return self.links(x)

    def tokens(self, number: Any, marks: Array | None) -> Tokens:
        """The tokens of a slab."""
        starts = marks is not None
        if marks is None:
            if self._tokens == self.chunks * self.length:
                return Tokens()
            marks = jnp.zeros((1, self._tokens), jnp.uint8)
        mine = self.links(self._slice(number, self._padded(marks))[:, :, None, None])[..., 0]
        number = jnp.cumsum(mine == segments.STARTS, axis=-1, dtype=jnp.int32) if starts else None
        return Tokens(mine != segments.PADDING, number)

    def room(self, x: Array) -> Array:
        """Zeros for what `put` writes, which is like `x` [B, T, ...]."""
        return jnp.zeros_like(x, shape=(x.shape[0], self.chunks * self.length, *x.shape[2:]))

    def put(self, number: Any, x: Array, found: Array) -> Array:
        """The inverse of `at` and `cut`, in an array that has the tokens of all slabs."""
        start = number * self._each * self.length
        return lax.dynamic_update_slice_in_dim(x, self.rows(found), start, 1)

    def _padded(self, marks: Array) -> Array:
        missing = self.chunks * self.length - marks.shape[1]
        return jnp.pad(marks, ((0, 0), (0, missing)), constant_values=segments.PADDING)

    def _slice(self, number: Any, x: Array) -> Array:
        size = self._each * self.length
        return lax.dynamic_slice_in_dim(x, number * size, size, 1)

    def links(self, x: Array) -> Array:
        """The tokens of a slab [B, ...] as links."""
        batch, _, heads, size = x.shape
        several = self.length // self._link
        x = x.reshape(batch, self._each, several, self._link, heads, size)
        return x.transpose(1, 2, 0, 4, 3, 5)

    def rows(self, links: Array) -> Array:
        """The inverse of `links`."""
        chunks, several, batch, heads, length, size = links.shape
        rows = links.transpose(2, 0, 1, 4, 3, 5)
        return rows.reshape(batch, chunks * several * length, heads, size)


def _evenly(chunks: int, most: int) -> int:
    """The number of chunks of a slab, at most so many and at least half of it. If possible it
    divides the number of all chunks, since filling up the last slab copies every operand."""
    fitting = (n for n in range(most, most // 2, -1) if chunks % n == 0)
    return next(fitting, most)


def _filled(x: Array, count: int) -> Array:
    """`x` [B, ...] with zeros up to so many entries of the second axis."""
    missing = [(0, 0)] * x.ndim
    missing[1] = 0, count - x.shape[1]
    return jnp.pad(x, missing)
