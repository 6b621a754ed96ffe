"""The arithmetic of many links side by side: decays between tokens, pairs of tokens, inverses.

Arrays of links are [..., T, K], [..., T, V] or, for pairs of tokens, [..., T, T], where T is the
number of tokens of a link, a power of two, and all links are batch axes of few, large products.

Where the log decay of a token is bounded, the decay between two tokens is a product of two factors,
one of each token, which are relative to the middle of the link and grow away from it. The same
factors lead from the state before the link, which is multiplied by the decay up to the middle, and
to the state after it. Otherwise all factors are at most 1: any two tokens are in different halves
of exactly one piece of 2, 4, 8, ... tokens, and the factors lead from each token to the middle of
that piece.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.decay import BOUNDED, LOG_DECAY, NO_DECAY
from rwkv_jax._portable.products import Products
from rwkv_jax._portable.terms import Read


class Tokens(NamedTuple):
    """The tokens of links [..., T].

    there: whether each is there, that is, neither padding nor behind the end; None if all are.
    segment: the number of the segment of each, where 0 continues from the state before the link;
      None if all tokens belong to that one.
    """

    there: Array | None = None
    segment: Array | None = None


class Exponents(NamedTuple):
    """Log decays of tokens: the decay between two tokens j < i, after j and before i, is
    `exp(before[i]) * exp(beyond[j])`, and with that of i `exp(upto[i]) * exp(beyond[j])`."""

    before: Array
    upto: Array
    beyond: Array

    def of(self, reads: Sequence[Read]) -> list[Array]:
        """What leads to the states that are read."""
        return [self.upto if read.after else self.before for read in reads]


class Decays(NamedTuple):
    """The decays of links: those of a bounded form relative to the middle of links.

    tokens: what leads to each token, and what leads from it [..., T, K].
    halves: for pairs of tokens of the second half and of the first half of pieces of 2, 4, 8, ...
      tokens, of which there are n [..., n, T / (2 n), K]. None where decays are bounded: there
      `tokens` is for all pairs.
    enter: the log decay from the start to the middle [..., K]; None if not bounded.
    stay: the factor of what states keep besides `enter` and `leave` [..., K]; None if all of it.
    leave: the log decay from the middle to the end [..., K]; None if not bounded.
    """

    tokens: Exponents
    halves: list[Exponents] | None
    enter: Array | None
    stay: Array | None
    leave: Array | None


class Factors(NamedTuple):
    """What G reads and H columns make of a link: R [..., G T, K] and C [..., H T, K], with the
    factors that lead to a token and from it, and P [..., G T, H T], for pairs of tokens."""

    rows: Array
    columns: Array
    pairs: Array


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
    # The gradient of the decay of a token alone is exactly 0 if the state before it is. Differences
    # of sums would leave a rounding error.
    bounded = decay in BOUNDED and log_decay.shape[-2] > 1
    result = _bounded(log_decay, product) if bounded else _unbounded(log_decay)
    if tokens.segment is None:
        return result
    goes_on = tokens.segment[..., -1:] == 0
    stay = jnp.ones_like(w[..., 0, :]) if result.stay is None else result.stay
    return result._replace(stay=jnp.where(goes_on, stay, 0.0))


def _unbounded(log_decay: Array) -> Decays:
    *sums, (_, before, after, total) = _sums(log_decay)
    between = []
    for half, before_half, after_half, _ in sums:
        upto = halves(before_half + log_decay, half)[1]
        between.append(Exponents(halves(before_half, half)[1], upto, halves(after_half, half)[0]))
    tokens = Exponents(before, before + log_decay, after)
    return Decays(tokens, between, None, jnp.exp(total[..., 0, :]), None)


def _bounded(log_decay: Array, product: Products) -> Decays:
    """From sums over all tokens up to one, and differences of them. What follows does not depend
    on which exponent is subtracted, so that it has no gradient of its own."""
    # Rounded log decays are as good as other rounded operands: all their sums have the same ones.
    precision = product.precision if product.rounds else lax.Precision.HIGHEST
    upto: Any = _sums_upto(precision, log_decay)
    before = upto - log_decay
    enter = lax.stop_gradient(before[..., before.shape[-2] // 2, :])
    middle = enter[..., None, :]
    tokens = Exponents(before - middle, upto - middle, middle - upto)
    return Decays(tokens, None, enter, None, upto[..., -1, :] - enter)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_upto(precision: lax.Precision, x: Array) -> Array:
    """The sums of the tokens up to each [..., T, K]. The transpose of a product that JAX derives
    would be laid out the other way round."""
    return _sums_where(lambda i, j: i >= j, precision, x)


_sums_upto.defvjp(
    lambda precision, x: (_sums_upto(precision, x), None),
    lambda precision, _, dsums: (_sums_where(lambda i, j: i <= j, precision, dsums),),
)


def _sums_where(
    chosen: Callable[[Array, Array], Array], precision: lax.Precision, x: Array
) -> Array:
    """For each token i the sums of the tokens j that are chosen, as products with a matrix of 0 and
    1."""
    side = x.shape[-2]
    matrix = chosen(*_entries(side)).astype(jnp.float32)
    matrix = jnp.broadcast_to(matrix, (*x.shape[:-2], side, side))
    return jnp.einsum("...ij,...jk->...ik", matrix, x, precision=precision)


def _entries(side: int) -> tuple[Array, Array]:
    """The row and the column of each entry of a matrix."""
    i, j = (lax.broadcasted_iota(jnp.int32, (side, side), axis) for axis in (0, 1))
    return i, j


def factors(
    product: Products, decays: Decays, tokens: Tokens, reads: Sequence[Read], columns: list[Array]
) -> tuple[Factors, Array | None]:
    """The factors, and which entries of P count, None if all do: whoever uses P takes 0 for the
    others. P has for each x that is read and y of `columns` a block: x_i . (decay between i and j)
    y_j where j < i, and 0 where j > i. If x is read after the token, its decay is part of that
    between i and j, and x_i . y_i is on the diagonal; else z_i . y_i is, with z the `now` of the
    read."""
    *lead, length, _ = columns[0].shape
    bounded = decays.halves is None
    found = _of_all_pairs if bounded else _of_all_pieces
    x, y, pairs = found(product, decays, reads, columns)
    *_, g, _, h, _ = pairs.shape
    there = None
    if bounded:
        distance = _distance(length)
        there = jnp.stack([distance >= 0 if read.after else distance > 0 for read in reads])
    if (segment := tokens.segment) is not None:
        x = _where(segment == 0, x)
        y = _where(segment == segment[..., -1:], y)
        same = (segment[..., :, None] == segment[..., None, :])[..., None, :, None, :]
        there = same if there is None else same & there.reshape(*[1] * len(lead), *there.shape)
    now = [(None if bounded else read.x) if read.after else read.now for read in reads]
    if any(z is not None for z in now):
        own = [jnp.stack([_same_token(z, y) for y in columns], axis=-1) for z in now]
        own = jnp.stack(own, axis=-3)[..., None].astype(pairs.dtype)
        if there is not None:
            pairs, there = jnp.where(there, pairs, jnp.zeros_like(pairs)), None
        pairs = jnp.where(_distance(length) == 0, pairs + own, pairs)
    if there is not None:
        there = jnp.broadcast_to(there, (*there.shape[:-4], g, length, h, length))
        there = there.reshape(*there.shape[:-4], g * length, h * length)
    return Factors(x, y, pairs.reshape(*lead, g * length, h * length)), there


def _of_all_pairs(
    product: Products, decays: Decays, reads: Sequence[Read], columns: list[Array]
) -> tuple[Array, Array, Array]:
    """R, C and P, in which pairs of a token and a later one have entries that do not count."""
    one_piece = functools.partial(jax.tree.map, lambda x: x[..., None, :, :])
    tokens, rows = decays.tokens, [read.x for read in reads]
    return _products(product, *map(one_piece, (rows, tokens.of(reads), columns, tokens.beyond)))


def _of_all_pieces(
    product: Products, decays: Decays, reads: Sequence[Read], columns: list[Array]
) -> tuple[Array, Array, Array]:
    """The same, but P is 0 on the diagonal and where nothing counts."""
    rows = [read.x for read in reads]
    *lead, length, _ = columns[0].shape
    shape = (*lead, len(rows), length, len(columns), length)
    pairs = jnp.zeros_like(rows[0], product.dtype, shape=shape)
    for exponents in decays.halves or []:
        half = exponents.beyond.shape[-2]
        x, y = [halves(x, half)[1] for x in rows], [halves(y, half)[0] for y in columns]
        found: Any = _products(product, x, exponents.of(reads), y, exponents.beyond)
        pairs += _of_halves(found[2], half)
    upto, beyond = decays.tokens.of(reads), [decays.tokens.beyond] * len(columns)
    shape = columns[0].shape
    x, y = _multiplied(product, rows, upto, shape), _multiplied(product, columns, beyond, shape)
    return x, y, pairs


def _multiplied(
    product: Products, several: list[Array], exponents: list[Array], shape: Sequence[int]
) -> Array:
    """Each of several arrays times the factors with its exponents, in the shape [..., T, K], one
    behind the other."""
    factors = [x * jnp.exp(e) for x, e in zip(several, exponents, strict=True)]
    return jnp.concatenate([x.astype(product.dtype).reshape(shape) for x in factors], axis=-2)


def _where(chosen: Array, x: Array) -> Array:
    """`x` [..., n T, K] where tokens [..., T] are chosen, and else 0."""
    several = x.shape[-2] // chosen.shape[-1]
    chosen = jnp.concatenate([chosen] * several, axis=-1)
    return jnp.where(chosen[..., None], x, jnp.zeros_like(x))


def _same_token(z: Array | None, y: Array) -> Array:
    """z_i . y_i [..., T]."""
    if z is None:
        return jnp.zeros_like(y[..., 0])
    return jnp.einsum("...tk,...tk->...t", z, y, precision=lax.Precision.HIGHEST)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _products(
    product: Products, rows: list[Array], upto: list[Array], columns: list[Array], beyond: Array
) -> tuple[Array, Array, Array]:
    """The factors [..., G n side, K] of G rows and [..., H n side, K] of H columns
    [..., n, side, K], with the exponents of each row and of all columns, and their products
    [..., G, n side, H, n side]. With few tokens in a piece, most of a matrix unit would have
    nothing to do, so that tokens of different pieces are multiplied, too: all factors are at most 1
    there."""
    return _products_forward(product, rows, upto, columns, beyond)[0]


def _products_forward(
    product: Products, rows: list[Array], upto: list[Array], columns: list[Array], beyond: Array
) -> tuple[tuple[Array, Array, Array], Any]:
    *lead, pieces, side, size = rows[0].shape
    shape = (*lead, pieces * side, size)
    x = _multiplied(product, rows, upto, shape)
    y = _multiplied(product, columns, [beyond] * len(columns), shape)
    found = product("...ik,...jk->...ij", x, y)
    found = found.reshape(*lead, len(rows), pieces * side, len(columns), pieces * side)
    return (x, y, found), (upto, beyond, x, y)


def _products_backward(
    product: Products, saved: Any, cotangents: tuple[Array, Array, Array]
) -> tuple[list[Array], list[Array], list[Array], Array]:
    """What a pair of tokens adds to the gradients of both exponents is of the same size. It cancels
    for the decays that both exponents have, so it is found from the same rounded factors, and is
    not rounded itself."""
    upto, beyond, x, y = saved
    more_dx, more_dy, found = cotangents
    found = found.reshape(*found.shape[:-4], x.shape[-2], y.shape[-2])
    dx = product("...ij,...jk->...ik", found, y, jnp.float32) + more_dx.astype(jnp.float32)
    dy = product("...ij,...ik->...jk", found, x, jnp.float32) + more_dy.astype(jnp.float32)

    def parts(of_all: Array) -> list[Array]:
        several = of_all.shape[-2] // (beyond.shape[-2] * beyond.shape[-3])
        return [part.reshape(beyond.shape) for part in jnp.split(of_all, several, axis=-2)]

    drows = [part * jnp.exp(e) for part, e in zip(parts(dx), upto, strict=True)]
    dcolumns = [part * jnp.exp(beyond) for part in parts(dy)]
    dupto, dbeyond = (parts(dz * z.astype(jnp.float32)) for dz, z in ((dx, x), (dy, y)))
    return drows, dupto, dcolumns, functools.reduce(jnp.add, dbeyond)


_products.defvjp(_products_forward, _products_backward)


def _pair(length: int) -> tuple[Array, Array]:
    """The numbers of both tokens of a pair [T, 1, T]."""
    first, second = (lax.broadcasted_iota(jnp.int32, (length, 1, length), a) for a in (0, 2))
    return first, second


def _distance(length: int) -> Array:
    """How many tokens the second token of a pair is before the first [T, 1, T]."""
    first, second = _pair(length)
    return first - second


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


def inverse(product: Products, x: Array) -> Array:
    """(I - x)^-1 in float32 for matrices x [..., T, T] with zeros where j >= i, first for pieces of
    few tokens, then of twice as many, and so on. No power of x appears, since powers may be large
    where the inverse is not."""
    times = _times if product.fewest else _times_one_by_one
    length, half = x.shape[-1], min(SMALL, x.shape[-1])
    result = _small_inverse(times, _blocks(x, half, half, 0))
    while half < length:
        if half > SMALL:
            times = _times
        first, second = _halves_of_matrices(result)
        between = times(times(second, _blocks(x, 2 * half, half, half)), first)
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


def _times_one_by_one(x: Array, y: Array) -> Array:
    """Elementwise, where matrices are so small that most of a matrix unit would have nothing to
    do."""
    terms = [x[..., :, k, None] * y[..., None, k, :] for k in range(x.shape[-1])]
    return functools.reduce(jnp.add, terms)


def _blocks(x: Array, every: int, side: int, below: int) -> Array:
    """Blocks on the diagonal, or so many rows below it: [..., n, side, side]."""
    starts = range(0, x.shape[-1], every)
    blocks = [x[..., i + below : i + below + side, i : i + side] for i in starts]
    return jnp.stack(blocks, axis=-3)


def _small_inverse(times: Callable[[Array, Array], Array], x: Array) -> Array:
    """By products of whole matrices, of which only the pairs of different halves count."""
    side = x.shape[-1]
    i, j = _entries(side)
    result, half = diagonal(jnp.ones_like(x[..., 0])), 1
    while half < side:
        differ = i ^ j
        between = jnp.where((i > j) & (half <= differ) & (differ < 2 * half), x, 0.0)
        result += times(times(result, between), result) if half > 1 else between
        half *= 2
    return result
