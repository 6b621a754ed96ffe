"""The arithmetic of a tile: products of matrices, decays between tokens, pairs of tokens.

Arrays of a tile are [T, K], [T, V] or, for pairs of its tokens, [T, T], with T = TILE. All
functions consist of elementwise operations, sums along an axis and products of matrices, which the
compilers of all platforms take.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import CHUNK, Arrays, Options
from rwkv_jax._portable import inverses
from rwkv_jax._portable.decay import BOUNDED, LOG_DECAY
from rwkv_jax._portable.products import entries

TILE = 16
"""Tokens: fewer are too few for products of matrices, and more take more of them."""

TILES = CHUNK // TILE
"""Tiles from one saved state to the next."""


class Product(NamedTuple):
    """Products of matrices in float32, of operands in `dtype`."""

    dtype: Any
    precision: Any

    def __call__(self, x: Array, y: Array, over: tuple[int, int] = (1, 0)) -> Array:
        """The sum over an axis of `x` and an axis of `y`."""
        return lax.dot_general(
            x.astype(self.dtype),
            y.astype(self.dtype),
            (((over[0],), (over[1],)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def sums(self, chosen: Array, x: Array, over: int = 1) -> Array:
        """The product of `chosen`, a matrix of 0, 1 and -1, and `x`: sums of rows of `x`, with 16
        binary digits of each number, or with all of them where products take float32."""
        add = Product(jnp.bfloat16, lax.Precision.DEFAULT)
        result = jnp.zeros_like(x)
        for _ in range(3 if self.dtype == jnp.float32 else 2):
            leading = x.astype(add.dtype)
            result += add(chosen, leading, (over, 0))
            x -= leading.astype(jnp.float32)
        return result


def product(options: Options, dtype: Any) -> Product:
    """The products of a call with inputs of a dtype. 16-bit inputs are multiplied in bfloat16,
    whose range the factors of decays need, unless the call is to be exact."""
    if dtype != jnp.float32 and not options.exact:
        return Product(jnp.bfloat16, lax.Precision.DEFAULT)
    fast = options.precision == lax.Precision.DEFAULT
    return Product(jnp.float32, lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST)


def diagonal(x: Array) -> Array:
    i, j = entries(x.shape[0])
    return jnp.where(i == j, x, 0.0)


def _row(x: Array) -> Array:
    """`x` [T, 1] as [1, T]."""
    i, j = entries(x.shape[0])
    return jnp.sum(jnp.where(i == j, x, 0), axis=0, keepdims=True)


def diagonal_of(x: Array) -> Array:
    """The diagonal [T, 1] of a matrix."""
    i, j = entries(x.shape[0])
    return jnp.sum(jnp.where(i == j, x, 0.0), axis=1, keepdims=True)


def _halves(length: int) -> list[int]:
    """Half the lengths of the pieces of a tile, which is cut into halves again and again."""
    return [length >> n for n in range(1, length.bit_length())]


class Level(NamedTuple):
    """Factors [T, K] of the decay between two tokens j < i, after j and before i. It is
    `rows[i] * columns[j]` for the pairs in `mask`."""

    rows: Array
    columns: Array
    mask: Array


class Decays(NamedTuple):
    """Decay factors of the tokens of a tile [T, K] and of its state [1, K].

    own: the decay of each token.
    before: times `entry`, the decay of all tokens before one.
    after: times `leave`, the decay of all tokens after one.
    stay: times `entry` and `leave`, the decay of all tokens.
    levels: the decay of the tokens between two.
    """

    own: Array
    before: Array
    after: Array
    entry: Array
    stay: Array
    leave: Array
    levels: tuple[Level, ...]


class Exponents(NamedTuple):
    """The cotangents of the logarithms of `Decays`, from which those of `entry` and `leave`
    follow."""

    own: Array
    before: Array
    after: Array
    stay: Array
    levels: tuple[tuple[Array, Array], ...]


class Tokens(NamedTuple):
    """The tokens of a tile [T, 1].

    there: whether each is there, that is, neither padding nor behind the end; None if all are.
    segment: the number of the segment of each, where 0 continues from the state before the tile;
      None if all tokens belong to that one.
    """

    there: Array | None = None
    segment: Array | None = None


def log_decay(w: Array, decay: str, length: int, tokens: Tokens) -> Array:
    """The log decay of each token [T, K], also where `w` [1, K] is the same for all tokens. Tokens
    that are not there do not decay."""
    result = jnp.broadcast_to(LOG_DECAY[decay](w), (length, w.shape[1]))
    return result if tokens.there is None else jnp.where(tokens.there, result, 0.0)


def _between(length: int, half: int) -> Array:
    """1 where the token of the second axis is between the token of the first axis and the middle of
    its piece."""
    i, t = entries(length)
    middle = (i & -(2 * half)) + half
    second = (middle <= t) & (t < i)
    first = (i < t) & (t < middle)
    return jnp.where((i >= middle) & second | (i < middle) & first, 1.0, 0.0)


def _past(length: int) -> Array:
    """The matrix that sums up the tokens before each token."""
    i, t = entries(length)
    return jnp.where(t < i, 1.0, 0.0)


def _from_middle(length: int) -> Array:
    """The matrix that sums up the tokens before each token, less those of the first half."""
    _, t = entries(length)
    return _past(length) - jnp.where(t < length // 2, 1.0, 0.0)


def _first_half(x: Array) -> Array:
    """`x` with zeros in place of the second half of the tokens."""
    i = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(i < x.shape[0] // 2, x, 0.0)


def total(x: Array) -> Array:
    """The sum over the rows [1, K]."""
    return jnp.sum(x, axis=0, keepdims=True)


def decays(product: Product, log_decay: Array, decay: str, tokens: Tokens) -> Decays:
    """The decays of a tile.

    Where decays are bounded, a single level has all pairs of tokens. Its factors grow away from the
    middle of the tile: `entry` brings the state there, and `leave` takes it to the end. Otherwise
    all factors are at most 1: any two tokens are in different halves of exactly one piece, and the
    factors lead from each token to the middle of that piece. Between segments all factors are 0.
    """
    result = _of_one_segment(product, log_decay, decay)
    if (segment := tokens.segment) is None:
        return result
    last, same = jnp.max(segment, axis=0, keepdims=True), segment == _row(segment)
    return result._replace(
        before=jnp.where(segment == 0, result.before, 0.0),
        after=jnp.where(segment == last, result.after, 0.0),
        stay=jnp.where(last == 0, result.stay, 0.0),
        levels=tuple(x._replace(mask=x.mask & same) for x in result.levels),
    )


def _of_one_segment(product: Product, log_decay: Array, decay: str) -> Decays:
    length = log_decay.shape[0]
    own, whole = jnp.exp(log_decay), total(log_decay)
    if decay in BOUNDED:
        exponents = product.sums(_from_middle(length), log_decay)
        rows, columns = jnp.exp(exponents), jnp.exp(-(exponents + log_decay))
        first, one = total(_first_half(log_decay)), jnp.ones_like(whole)
        level = Level(rows, columns, _past(length) > 0)
        return Decays(own, rows, columns, jnp.exp(first), one, jnp.exp(whole - first), (level,))
    before = jnp.exp(product.sums(_past(length), log_decay))
    after = jnp.exp(product.sums(_past(length), log_decay, over=0))
    levels = []
    for half in _halves(length):
        factors = jnp.exp(product.sums(_between(length, half), log_decay))
        levels.append(Level(factors, factors, inverses.of_halves(*entries(length), half)))
    one = jnp.ones_like(whole)
    return Decays(own, before, after, one, jnp.exp(whole), one, tuple(levels))


def log_decay_gradient(product: Product, exponents: Exponents, decay: str) -> Array:
    """The cotangent of the log decay of each token, from the cotangents of the exponents."""
    own, before, after, stay, levels = exponents
    length = own.shape[0]
    if decay in BOUNDED:
        ((rows, columns),) = levels
        rows, columns = rows + before, columns + after
        entry, leave = stay + total(before), stay + total(after)
        result = product.sums(_from_middle(length), rows - columns, over=0) + own - columns
        return result + leave + _first_half(jnp.broadcast_to(entry - leave, own.shape))
    result = own + stay
    result += product.sums(_past(length), before, over=0) + product.sums(_past(length), after)
    for half, (rows, columns) in zip(_halves(length), levels, strict=True):
        result += product.sums(_between(length, half), rows + columns, over=0)
    return result


def pairs(
    product: Product, levels: Sequence[Level], rows: Sequence[Array], columns: Sequence[Array]
) -> list[list[Array]]:
    """For each x of `rows` and y of `columns` the matrix of x_i . (decay between i and j) y_j, with
    zeros where j >= i."""
    result = [[jnp.zeros((rows[0].shape[0],) * 2, jnp.float32) for _ in columns] for _ in rows]
    for level in levels:
        left = [x * level.rows for x in rows]
        right = [y * level.columns for y in columns]
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                result[i][j] += jnp.where(level.mask, product(x, y, (1, 1)), 0.0)
    return result


def pairs_gradient(
    product: Product,
    levels: Sequence[Level],
    rows: Sequence[Array],
    columns: Sequence[Array],
    d_pairs: Sequence[Sequence[Array]],
) -> tuple[list[Array], list[Array], tuple[tuple[Array, Array], ...]]:
    """Cotangents of the rows, of the columns and of the exponents of the levels."""
    d_rows = [jnp.zeros_like(x) for x in rows]
    d_columns = [jnp.zeros_like(y) for y in columns]
    exponents = []
    for level in levels:
        # Rounded as the products take them: contributions to exponents cancel each other.
        left = [(x * level.rows).astype(product.dtype) for x in rows]
        right = [(y * level.columns).astype(product.dtype) for y in columns]
        d_left = [jnp.zeros_like(x) for x in rows]
        d_right = [jnp.zeros_like(y) for y in columns]
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                d_pair = jnp.where(level.mask, d_pairs[i][j], 0.0)
                d_left[i] += product(d_pair, y)
                d_right[j] += product(d_pair, x, (0, 0))
        exponents.append((_dotted(d_left, left), _dotted(d_right, right)))
        d_rows = [d + x * level.rows for d, x in zip(d_rows, d_left, strict=True)]
        d_columns = [d + x * level.columns for d, x in zip(d_columns, d_right, strict=True)]
    return d_rows, d_columns, tuple(exponents)


def _dotted(xs: Sequence[Array], ys: Sequence[Array]) -> Array:
    first, *rest = (x * y.astype(jnp.float32) for x, y in zip(xs, ys, strict=True))
    return sum(rest, first)


def summed(found: Iterable[tuple[Arrays, Array]]) -> tuple[Arrays, list[Array]]:
    """The sums over groups of rows, and what each group has of its own."""
    sums: Arrays = {}
    each = []
    for more, own in found:
        sums = {name: sums[name] + x if sums else x for name, x in more.items()}
        each.append(own)
    return sums, each
