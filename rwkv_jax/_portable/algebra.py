"""The arithmetic of many links side by side: decays between tokens, pairs of tokens, inverses.

Arrays of links are [..., T, K], [..., T, V] or, for pairs of tokens, [..., T, T], where T is the
number of tokens of a link, a power of two, and all links are batch axes of few, large products.

Where the log decay of a token is bounded, the decay between two tokens is a product of two factors,
one of each token, which grow away from the middle of the link. Otherwise all factors are at most 1:
any two tokens are in different halves of exactly one piece of 2, 4, 8, ... tokens, and the factors
lead from each token to the middle of that piece.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.decay import BOUNDED, LOG_DECAY, NO_DECAY

Einsum: TypeAlias = Callable[..., Array]
"""`jnp.einsum` with the precision of a call."""


class Tokens(NamedTuple):
    """The tokens of links [..., T].

    there: whether each is there, that is, neither padding nor behind the end; None if all are.
    segment: the number of the segment of each, where 0 continues from the state before the link;
      None if all tokens belong to that one.
    """

    there: Array | None = None
    segment: Array | None = None


class Factors(NamedTuple):
    """The decay between two tokens j < i, after j and before i, is `rows[i] * columns[j]`."""

    rows: Array
    columns: Array


class Decays(NamedTuple):
    """Decay factors of links.

    own: of each token [..., T, K].
    before: of all tokens before one [..., T, K].
    after: of all tokens after one [..., T, K].
    stay: of all tokens [..., K].
    between: of the tokens between two. Where decays are bounded, the factors of all pairs.
      Otherwise for pieces of 2, 4, 8, ... tokens, of which there are n, the factors of the second
      half and of the first half [..., n, T / (2 n), K].
    same: whether two tokens belong to the same segment [..., T, T]; None if all do.
    """

    own: Array
    before: Array
    after: Array
    stay: Array
    between: Factors | list[Factors]
    same: Array | None


def halves(x: Array, half: int) -> tuple[Array, Array]:
    """[..., T, K] as the first and the second halves [..., n, half, K] of pieces."""
    *lead, tokens, size = x.shape
    pieces = x.reshape(*lead, tokens // (2 * half), 2, half, size)
    return pieces[..., 0, :, :], pieces[..., 1, :, :]


def _joined(first: Array, second: Array) -> Array:
    """The inverse of `halves`."""
    *lead, pieces, half, size = first.shape
    return jnp.concatenate([first, second], axis=-2).reshape(*lead, pieces * 2 * half, size)


def _sums(x: Array) -> Iterator[tuple[int, Array, Array, Array]]:
    """For pieces of 1, 2, 4, ... tokens up to the whole link: their length, the sums of the tokens
    before each token of a piece, those of the tokens after it, [..., T, K], and those of each piece
    [..., n, K]. Nothing is subtracted, so a large number leaves the others their digits."""
    before = after = jnp.zeros_like(x)
    total, length = x, 1
    while True:
        yield length, before, after, total
        if length == x.shape[-2]:
            return
        first, second = (part[..., 0, :][..., None, :] for part in halves(total, 1))
        (b, then), (earlier, a) = halves(before, length), halves(after, length)
        before, after = _joined(b, then + first), _joined(earlier + second, a)
        total = (first + second)[..., 0, :]
        length *= 2


def decays(w: Array, decay: str, tokens: Tokens) -> Decays:
    """The decays of links, from `w` of each token [..., T, K]."""
    if tokens.there is not None:
        # Here, and not below, where XLA would choose anew for each of the sums that it computes.
        w = jnp.where(tokens.there[..., None], w, NO_DECAY[decay])
    log_decay = LOG_DECAY[decay](w)
    *sums, (length, before, after, total) = _sums(log_decay)
    own = jnp.exp(log_decay)
    between: Factors | list[Factors]
    if decay in BOUNDED:
        middle = halves(before, length // 2)[1][..., 0, :1, :] if length > 1 else before
        exponents = before - middle
        between = Factors(jnp.exp(exponents), jnp.exp(-(exponents + log_decay)))
    else:
        between = [
            Factors(jnp.exp(halves(upto, half)[1]), jnp.exp(halves(beyond, half)[0]))
            for half, upto, beyond, _ in sums
        ]
    to_start, to_end, stay = jnp.exp(before), jnp.exp(after), jnp.exp(total[..., 0, :])
    result = Decays(own, to_start, to_end, stay, between, None)
    if (segment := tokens.segment) is None:
        return result
    last = segment[..., -1:]
    return result._replace(
        before=jnp.where((segment == 0)[..., None], to_start, 0.0),
        after=jnp.where((segment == last)[..., None], to_end, 0.0),
        stay=jnp.where(last == 0, stay, 0.0),
        same=segment[..., :, None] == segment[..., None, :],
    )


def pairs(
    einsum: Einsum, decays: Decays, rows: Sequence[Array], columns: Sequence[Array]
) -> list[list[Array]]:
    """For each x of `rows` and y of `columns` the matrix of x_i . (decay between i and j) y_j, with
    zeros where j >= i."""
    length = rows[0].shape[-2]
    if isinstance(factors := decays.between, Factors):
        result = _products(
            einsum, [x * factors.rows for x in rows], [y * factors.columns for y in columns]
        )
        earlier = _earlier(length)
        result = [[jnp.where(earlier, x, 0.0) for x in several] for several in result]
    else:
        nothing = jnp.zeros_like(rows[0], shape=(*rows[0].shape[:-1], 1, 1))
        result = [[nothing] * len(columns) for _ in rows]
        for factor in factors:
            half = factor.rows.shape[-2]
            between = _products(
                einsum,
                [halves(x, half)[1] * factor.rows for x in rows],
                [halves(y, half)[0] * factor.columns for y in columns],
            )
            result = jax.tree.map(_lower, result, between)
        result = [[x[..., 0, :, :] for x in several] for several in result]
    if decays.same is None:
        return result
    return [[jnp.where(decays.same, x, 0.0) for x in several] for several in result]


def _products(einsum: Einsum, rows: Sequence[Array], columns: Sequence[Array]) -> list[list[Array]]:
    """For each pair, as blocks of one product."""
    x, y = (jnp.concatenate(several, axis=-2) for several in (rows, columns))
    product = einsum("...ik,...jk->...ij", x, y)
    return [jnp.split(x, len(columns), axis=-1) for x in jnp.split(product, len(rows), axis=-2)]


def _earlier(length: int) -> Array:
    """Whether the second token of a pair is before the first [T, T]."""
    i, j = (lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    return i > j


def _lower(diagonal: Array, between: Array) -> Array:
    """The matrices of pieces of twice as many tokens, from those of their halves [..., 2 n, T, T]
    and those of pairs of tokens of both halves [..., n, T, T]."""
    first, second = _halves_of_matrices(diagonal)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([between, second], axis=-1)], axis=-2)


def _halves_of_matrices(x: Array) -> tuple[Array, Array]:
    """The matrices [..., n, T, T] of the first and of the second halves of pieces."""
    *lead, pieces, side, _ = x.shape
    pieces = x.reshape(*lead, pieces // 2, 2, side, side)
    return pieces[..., 0, :, :], pieces[..., 1, :, :]


def diagonal(x: Array) -> Array:
    """The matrices with the diagonals `x` [..., T]."""
    return jnp.where(jnp.eye(x.shape[-1], dtype=bool), x[..., None], 0.0)


SMALL = 8
"""The side of a matrix whose inverse takes the fewest products, though most of their terms are 0:
of fewer rows there are too many matrices."""


def inverse(x: Array) -> Array:
    """(I - x)^-1 for matrices x [..., T, T] with zeros where j >= i, first for pieces of few
    tokens, then of twice as many, and so on. No power of x appears, since powers may be large where
    the inverse is not."""
    length, half = x.shape[-1], min(SMALL, x.shape[-1])
    result = _small_inverse(_blocks(x, half, half, 0))
    while half < length:
        first, second = _halves_of_matrices(result)
        between = _times(_times(second, _blocks(x, 2 * half, half, half)), first)
        result = _lower(result, between)
        half *= 2
    return result[..., 0, :, :]


def _times(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _blocks(x: Array, every: int, side: int, below: int) -> Array:
    """Blocks on the diagonal, or so many rows below it: [..., n, side, side]."""
    starts = range(0, x.shape[-1], every)
    blocks = [x[..., i + below : i + below + side, i : i + side] for i in starts]
    return jnp.stack(blocks, axis=-3)


def _small_inverse(x: Array) -> Array:
    """By products of whole matrices, of which only the pairs of different halves count."""
    side = x.shape[-1]
    i, j = (lax.broadcasted_iota(jnp.int32, (side, side), axis) for axis in (0, 1))
    result, half = diagonal(jnp.ones_like(x[..., 0])), 1
    while half < side:
        differ = i ^ j
        between = jnp.where((i > j) & (half <= differ) & (differ < 2 * half), x, 0.0)
        result += _times(_times(result, between), result) if half > 1 else between
        half *= 2
    return result
