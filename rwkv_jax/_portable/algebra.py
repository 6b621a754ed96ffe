"""The arithmetic of many links side by side: decays between tokens, pairs of tokens, inverses.

Arrays of links are [..., T, K], [..., T, V] or, for pairs of tokens, [..., T, T], where T is the
number of tokens of a link, a power of two, and all links are batch axes of few, large products.

Where the log decay of a token is bounded, the decay between two tokens is a product of two factors,
one of each token, which grow away from the middle of the link. Otherwise all factors are at most 1:
any two tokens are in different halves of exactly one piece of 2, 4, 8, ... tokens, and the factors
lead from each token to the middle of that piece.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.decay import BOUNDED, LOG_DECAY, NO_DECAY
from rwkv_jax._portable.products import Products


class Tokens(NamedTuple):
    """The tokens of links [..., T].

    there: whether each is there, that is, neither padding nor behind the end; None if all are.
    segment: the number of the segment of each, where 0 continues from the state before the link;
      None if all tokens belong to that one.
    """

    there: Array | None = None
    segment: Array | None = None


class Exponents(NamedTuple):
    """The decay between two tokens j < i, after j and before i, is
    `exp(rows[i]) * exp(columns[j])`."""

    rows: Array
    columns: Array


class Decays(NamedTuple):
    """Decay factors of links.

    own: of each token [..., T, K].
    before: of all tokens before one [..., T, K].
    after: of all tokens after one [..., T, K].
    stay: of all tokens [..., K].
    whole: for all pairs of tokens [..., 1, T, K], where decays are bounded; else None.
    halves: else for pairs of tokens of the second half and of the first half of pieces of 2, 4, 8,
      ... tokens, of which there are n [..., n, T / (2 n), K].
    same: whether two tokens belong to the same segment [..., T, T]; None if all do.
    """

    own: Array
    before: Array
    after: Array
    stay: Array
    whole: Exponents | None
    halves: list[Exponents]
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


def decays(w: Array, decay: str, tokens: Tokens, product: Products) -> Decays:
    """The decays of links, from `w` of each token [..., T, K]."""
    if tokens.there is not None:
        # Here, and not below, where XLA would choose anew for each of the sums that it computes.
        w = jnp.where(tokens.there[..., None], w, NO_DECAY[decay])
    log_decay = LOG_DECAY[decay](w)
    bounded = decay in BOUNDED
    result = _rounded(log_decay) if bounded and product.rounds else _exact(log_decay, bounded)
    if (segment := tokens.segment) is None:
        return result
    last = segment[..., -1:]
    return result._replace(
        before=jnp.where((segment == 0)[..., None], result.before, 0.0),
        after=jnp.where((segment == last)[..., None], result.after, 0.0),
        stay=jnp.where(last == 0, result.stay, 0.0),
        same=segment[..., :, None] == segment[..., None, :],
    )


def _exact(log_decay: Array, bounded: bool) -> Decays:
    *sums, (_, before, after, total) = _sums(log_decay)
    whole, between = None, []
    if bounded:
        whole = _around_the_middle(before, log_decay)
    else:
        between = [
            Exponents(halves(upto, half)[1], halves(beyond, half)[0])
            for half, upto, beyond, _ in sums
        ]
    return _decays(log_decay, before, after, total[..., 0, :], whole, between)


def _rounded(log_decay: Array) -> Decays:
    """From differences of sums over all tokens before one, which leave out what bfloat16 has no
    digits for. Only where decays are bounded: among strong ones, the gradients of the decays would
    have no digits left."""
    before = _sums_before(log_decay)
    upto = before + log_decay
    end = upto[..., -1, :]
    whole = _around_the_middle(before, log_decay)
    return _decays(log_decay, before, end[..., None, :] - upto, end, whole, [])


def _around_the_middle(before: Array, log_decay: Array) -> Exponents:
    """The exponents of all pairs of tokens [..., T, K]."""
    exponents = before - before[..., before.shape[-2] // 2, :][..., None, :]
    rows, columns = exponents, -(exponents + log_decay)
    return Exponents(rows[..., None, :, :], columns[..., None, :, :])


def _decays(
    own: Array,
    before: Array,
    after: Array,
    total: Array,
    whole: Exponents | None,
    between: list[Exponents],
) -> Decays:
    own, before, after, total = map(jnp.exp, (own, before, after, total))
    return Decays(own, before, after, total, whole, between, None)


def _sums_before(x: Array) -> Array:
    """The sums of the tokens before each [..., T, K], as products with a matrix of 0 and 1."""
    side = x.shape[-2]
    i, j = (lax.broadcasted_iota(jnp.int32, (side, side), axis) for axis in (0, 1))
    chosen = jnp.broadcast_to((i > j).astype(jnp.float32), (*x.shape[:-2], side, side))
    return jnp.einsum("...ij,...jk->...ik", chosen, x)


def pairs(
    product: Products,
    decays: Decays,
    rows: Sequence[Array],
    columns: Sequence[Array],
    now: Sequence[Array | None],
) -> Array:
    """For each x of `rows` and y of `columns` a block of one matrix: x_i . (decay between i and j)
    y_j where j < i, and 0 where j > i. On its diagonal is z_i . y_i with z of `now` in the place of
    x, or 0 if z is None."""
    *lead, length, _ = rows[0].shape
    if (exponents := decays.whole) is not None:
        x, y = ([x[..., None, :, :] for x in several] for several in (rows, columns))
        result = _of_earlier(_products(product, x, y, exponents))
    else:
        shape = (*lead, len(rows), length, len(columns), length)
        result = jnp.zeros_like(rows[0], product.dtype, shape=shape)
    for exponents in decays.halves:
        half = exponents.rows.shape[-2]
        x, y = [halves(x, half)[1] for x in rows], [halves(y, half)[0] for y in columns]
        result += _of_halves(_products(product, x, y, exponents), half)
    if decays.same is not None:
        same = decays.same[..., None, :, None, :]
        result = jnp.where(same, result, jnp.zeros_like(result))
    own = jnp.stack(
        [jnp.stack([_same_token(z, y) for y in columns], axis=-1) for z in now], axis=-3
    )
    result = jnp.where(_distance(length) == 0, own[..., None].astype(result.dtype), result)
    return result.reshape(*lead, len(rows) * length, len(columns) * length)


def _same_token(z: Array | None, y: Array) -> Array:
    """z_i . y_i [..., T]."""
    if z is None:
        return jnp.zeros_like(y[..., 0])
    return jnp.einsum("...tk,...tk->...t", z, y, precision=lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(
    product: Products, rows: list[Array], columns: list[Array], exponents: Exponents
) -> Array:
    """[..., G, n side, H, n side] for G rows and H columns [..., n, side, K]. With few tokens in a
    piece, most of a matrix unit would have nothing to do, so that tokens of different pieces are
    multiplied, too: all factors are at most 1 there."""
    return _products_forward(product, rows, columns, exponents)[0]


def _products_forward(
    product: Products, rows: list[Array], columns: list[Array], exponents: Exponents
) -> tuple[Array, Any]:
    *lead, pieces, side, size = rows[0].shape

    def joined(several: list[Array], e: Array) -> Array:
        factors = [(x * jnp.exp(e)).astype(product.dtype) for x in several]
        return jnp.concatenate([x.reshape(*lead, pieces * side, size) for x in factors], axis=-2)

    x, y = joined(rows, exponents.rows), joined(columns, exponents.columns)
    found = product("...ik,...jk->...ij", x, y)
    found = found.reshape(*lead, len(rows), pieces * side, len(columns), pieces * side)
    return found, (rows, columns, exponents, x, y)


def _products_backward(
    product: Products, saved: Any, found: Array
) -> tuple[list[Array], list[Array], Exponents]:
    """What a pair of tokens adds to the gradients of both exponents is of the same size. It cancels
    for the decays that both exponents have, so it is found from the same rounded factors, and is
    not rounded itself."""
    rows, columns, exponents, x, y = saved
    found = found.reshape(*found.shape[:-4], x.shape[-2], y.shape[-2])
    dx = product("...ij,...jk->...ik", found, y, jnp.float32)
    dy = product("...ij,...ik->...jk", found, x, jnp.float32)

    def both(several: list[Array], e: Array, x: Array, dx: Array) -> tuple[list[Array], Array]:
        parts, sums = (
            [part.reshape(e.shape) for part in jnp.split(of_all, len(several), axis=-2)]
            for of_all in (dx, dx * x.astype(jnp.float32))
        )
        return [part * jnp.exp(e) for part in parts], functools.reduce(jnp.add, sums)

    drows, drow = both(rows, exponents.rows, x, dx)
    dcolumns, dcolumn = both(columns, exponents.columns, y, dy)
    return drows, dcolumns, Exponents(drow, dcolumn)


_products.defvjp(_products_forward, _products_backward)


def _pair(length: int) -> tuple[Array, Array]:
    """The numbers of both tokens of a pair [T, 1, T]."""
    first, second = (lax.broadcasted_iota(jnp.int32, (length, 1, length), a) for a in (0, 2))
    return first, second


def _distance(length: int) -> Array:
    """How many tokens the second token of a pair is before the first [T, 1, T]."""
    first, second = _pair(length)
    return first - second


def _of_earlier(x: Array) -> Array:
    """Matrices of pairs [..., T, H, T] with zeros where j >= i."""
    return jnp.where(_distance(x.shape[-1]) > 0, x, jnp.zeros_like(x))


def _of_halves(x: Array, half: int) -> Array:
    """Matrices of pairs of tokens [..., G, T, H, T] from those of the tokens of second halves and
    of first halves [..., G, T / 2, H, T / 2], with zeros for all pairs but those in one piece."""
    *lead, g, tokens, h, _ = x.shape
    pieces, length = tokens // half, 2 * tokens
    x = x.reshape(*lead, g, pieces, 1, half, h, pieces, 1, half)
    none, second, first = (0, 0, 0), (1, 0, 0), (0, 1, 0)
    widths = [none] * len(lead) + [none, none, second, none, none, none, first, none]
    x = lax.pad(x, jnp.zeros((), x.dtype), widths).reshape(*lead, g, length, h, length)
    i, j = _pair(length)
    return jnp.where(i // (2 * half) == j // (2 * half), x, jnp.zeros_like(x))


def _lower(first: Array, second: Array, between: Array) -> Array:
    """The matrices of pieces of twice as many tokens [..., 2 T, 2 T], from those of their halves
    and those of pairs of tokens of both halves [..., T, T]."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([between, second], axis=-1)], axis=-2)


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
        result = _lower(first, second, between)
        half *= 2
    return result[..., 0, :, :]


def _halves_of_matrices(x: Array) -> tuple[Array, Array]:
    """The matrices [..., n, T, T] of the first and of the second halves of pieces."""
    *lead, pieces, side, _ = x.shape
    pieces = x.reshape(*lead, pieces // 2, 2, side, side)
    return pieces[..., 0, :, :], pieces[..., 1, :, :]


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
