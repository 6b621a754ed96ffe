"""The inverses of lower triangular matrices [..., T, T]: of many sub-chunks side by side, and of
one tile in a kernel."""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.products import Products, entries

SMALL = 8
"""The side of a matrix whose inverse takes the fewest products, though most of their terms are 0:
of fewer rows there are too many matrices."""


def inverse(product: Products, x: Array) -> Array:
    """(I - x)^-1 in float32 for matrices x [..., T, T], whose entries j >= i are taken for 0, first
    for pieces of few tokens, then of twice as many, and so on. No power of x appears, since powers
    may be large where the inverse is not."""
    times = _times if product.minimize_flops else _times_one_by_one
    length, half = x.shape[-1], min(SMALL, x.shape[-1])
    result = by_whole_matrices(times, _blocks(x, half, half, 0))
    while half < length:
        if half > SMALL:
            times = _times
        first, second = _halves_of_matrices(result)
        between = times(times(second, _blocks(x, 2 * half, half, half)), first)
        result = _lower(first, second, between)
        half *= 2
    return result[..., 0, :, :]


def _lower(first: Array, second: Array, between: Array) -> Array:
    """The matrices of pieces of twice as many tokens [..., 2 T, 2 T], from those of their halves
    and those of pairs of tokens of both halves [..., T, T]."""
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([between, second], axis=-1)], axis=-2)


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


def by_whole_matrices(times: Callable[[Array, Array], Array], x: Array) -> Array:
    """(I - x)^-1 for matrices x [..., T, T] below the diagonal, for pieces of two tokens, then of
    four, and so on, by products of whole matrices, of which only the pairs of different halves
    count. No power of x appears."""
    i, j = entries(x.shape[-1])
    result, half = jnp.broadcast_to(jnp.where(i == j, 1.0, 0.0), x.shape), 1
    while half < x.shape[-1]:
        between = jnp.where(of_halves(i, j, half), x, 0.0)
        result += times(times(result, between), result) if half > 1 else between
        half *= 2
    return result


def of_halves(i: Array, j: Array, half: int) -> Array:
    """Whether the token i is in the second half of a piece of 2 * half tokens, and the token j in
    the first half of the same piece: then `half` is the highest bit in which the two differ."""
    differ = i ^ j
    return (i > j) & (half <= differ) & (differ < 2 * half)
