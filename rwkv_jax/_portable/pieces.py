"""Sub-chunks where decays may be as strong as they like.

Any two tokens are in different halves of exactly one piece of 2, 4, 8, ... tokens. The decay
between them is a product of two factors, which lead from each of them to the middle of that piece
and are at most 1. With few tokens in a piece, most of a matrix unit would have nothing to do, so
that tokens of different pieces are multiplied, too.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.products import Products, entries, multiplied, sums
from rwkv_jax._portable.terms import Read


def factors(
    product: Products, log_decay: Array, reads: Sequence[Read], columns: list[Array]
) -> tuple[Array, Array, Array]:
    """R, C and P as blocks [..., G, T, H, T], which are 0 for a token and itself, and for a token
    and a later one."""
    own = jnp.exp(log_decay)
    rows = [read.x * own if read.after else read.x for read in reads]
    *lead, length, _ = log_decay.shape
    between: Any = (_by_halves if product.minimize_flops else _between)(product, log_decay)
    x = _multiplied_halves(product, rows, 1, between.second)
    y = _multiplied_halves(product, columns, 0, between.first)
    pairs = jnp.zeros((*lead, len(rows), length, len(columns), length), product.dtype)
    for half, found in zip(_half_lengths(length), _products(product, x, y), strict=True):
        pairs += _of_pieces(found, half, len(rows), len(columns))
    several = [multiplied(product, x, between.before) for x in rows]
    others = [multiplied(product, y, between.after) for y in columns]
    return jnp.concatenate(several, axis=-2), jnp.concatenate(others, axis=-2), pairs


class _Between(NamedTuple):
    """The factors of the decays of tokens [..., T, K], in the dtype of products.

    before: from the start of the sub-chunk to each token.
    after: from each token to the end of the sub-chunk.
    second: from the middle of pieces to the tokens of their second halves [..., T / 2, K], for
      pieces of 4, 8, ... tokens. Pieces of 2 tokens have no others between them.
    first: from the tokens of first halves to the middle.
    """

    before: Array
    after: Array
    second: list[Array]
    first: list[Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _between(product: Products, log_decay: Array) -> _Between:
    """From sums of log decays. Nothing is subtracted, so that a large number leaves the others
    their digits. The transpose of a product that JAX derives would be laid out the other way round.
    """
    return _between_forward(product, log_decay)[0]


def _between_forward(product: Products, log_decay: Array) -> tuple[_Between, Array]:
    length = log_decay.shape[-2]
    found = jnp.exp(sums(product, _tokens_between(length), log_decay)).astype(product.dtype)
    before, after, halves = jnp.split(found, [length, 2 * length], axis=-2)
    lengths = len(_half_lengths(length)[1:])
    parts = jnp.split(halves, 2 * lengths, axis=-2) if lengths else []
    return _Between(before, after, parts[:lengths], parts[lengths:]), found


def _between_backward(product: Products, found: Array, dbetween: _Between) -> tuple[Array]:
    length = dbetween.before.shape[-2]
    dsums = jnp.concatenate(jax.tree.leaves(dbetween), axis=-2) * found
    return (sums(product, _tokens_between(length).T, dsums, rounded=True),)


_between.defvjp(_between_forward, _between_backward)


def _by_halves(product: Products, log_decay: Array) -> _Between:
    """The same as `_between` in float32, with the fewest additions: the sums of a piece follow from
    those of its halves."""
    *lead, length, size = log_decay.shape
    before = after = jnp.zeros_like(log_decay)
    total, second, first = log_decay, list[Array](), list[Array]()
    for half in _half_lengths(length):
        pieces = (*lead, length // (2 * half), 2, half, size)
        earlier, later = _unstacked(total.reshape(*pieces[:-2], 1, size))
        (b, c), (y, z) = _unstacked(before.reshape(pieces)), _unstacked(after.reshape(pieces))
        if half > 1:
            second.append(c.reshape(*lead, length // 2, size))
            first.append(y.reshape(*lead, length // 2, size))
        before = jnp.stack([b, c + earlier], axis=-3).reshape(log_decay.shape)
        after = jnp.stack([y + later, z], axis=-3).reshape(log_decay.shape)
        total = earlier + later
    return jax.tree.map(jnp.exp, _Between(before, after, second, first))


def _tokens_between(length: int) -> Array:
    """A row for each factor of `_Between`, with the tokens whose decays are in it."""
    i, j = entries(length)
    second, first = list[Array](), list[Array]()
    for half in _half_lengths(length)[1:]:
        start = i // half * half
        second.append(_halves((start <= j) & (j < i), half)[1])
        first.append(_halves((i < j) & (j < start + half), half)[0])
    return jnp.concatenate([j < i, j > i, *second, *first])


def _half_lengths(length: int) -> list[int]:
    """Half the lengths of pieces of up to so many tokens."""
    return [1 << i for i in range(length.bit_length() - 1)]


def _halves(x: Array, half: int) -> tuple[Array, Array]:
    """The tokens [..., T, K] of the first and of the second halves of pieces [..., T / 2, K]."""
    *lead, length, size = x.shape
    pieces = _unstacked(x.reshape(*lead, length // (2 * half), 2, half, size))
    first, second = (x.reshape(*lead, length // 2, size) for x in pieces)
    return first, second


def _unstacked(x: Array) -> tuple[Array, Array]:
    return x[..., 0, :, :], x[..., 1, :, :]


def _multiplied_halves(
    product: Products, several: list[Array], which: int, factors: list[Array]
) -> list[Array]:
    """For each length of pieces, the tokens of arrays [..., T, K] that are in their first or in
    their second halves, times their factors, one array behind the other."""
    found = []
    for i, half in enumerate(_half_lengths(several[0].shape[-2])):
        chosen = [_halves(x, half)[which] for x in several]
        if half > 1:
            chosen = [multiplied(product, x, factors[i - 1]) for x in chosen]
        found.append(jnp.concatenate([x.astype(product.dtype) for x in chosen], axis=-2))
    return found


def _products(product: Products, x: list[Array], y: list[Array]) -> list[Array]:
    """The products of the tokens of second and of first halves for each length of pieces."""
    if product.minimize_flops or not x:
        return [product("...ik,...jk->...ij", *both) for both in zip(x, y, strict=True)]
    found = product("...ik,...jk->...ij", jnp.stack(x, axis=-3), jnp.stack(y, axis=-3))
    return [found[..., i, :, :] for i in range(len(x))]


def _of_pieces(x: Array, half: int, g: int, h: int) -> Array:
    """Matrices of pairs of tokens [..., G, T, H, T] from those of the tokens of second halves and
    of first halves [..., G T / 2, H T / 2], with zeros for all pairs but those in one piece."""
    *lead, tokens, _ = x.shape
    tokens //= g
    x = x.reshape(*lead, g, tokens // half, 1, half, h, tokens // half, 1, half)
    none, second, first = (0, 0, 0), (1, 0, 0), (0, 1, 0)
    widths = [none] * len(lead) + [none, none, second, none, none, none, first, none]
    x = lax.pad(x, jnp.zeros((), x.dtype), widths).reshape(*lead, g, 2 * tokens, h, 2 * tokens)
    i, j = (n[:, None, :] // (2 * half) for n in entries(2 * tokens))
    return jnp.where(i == j, x, 0)
