"""Sub-chunks where the log decay of a token is bounded.

The decay between two tokens is a product of two factors, one of each token, which are relative to
the middle of the sub-chunk and grow away from it. With the decay "sigmoid" the log decay of a token
is above -0.61, so that a factor is at most e^19.5 in a sub-chunk of 64 tokens. The same factors
lead from the state before the sub-chunk, which is multiplied by the decay up to the middle, and to
the state after it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable.products import Products, entries, multiplied, sums
from rwkv_jax._portable.terms import Read


class Exponents(NamedTuple):
    """Log decays of tokens [..., T, K]. The decay between two tokens j < i, after j and before i,
    is `exp(before[i]) * exp(beyond[j])`, and with that of i `exp(upto[i]) * exp(beyond[j])`."""

    before: Array
    upto: Array
    beyond: Array

    def of(self, reads: Sequence[Read]) -> list[Array]:
        """What leads to the states that are read."""
        return [self.upto if read.after else self.before for read in reads]


def exponents(product: Products, log_decay: Array) -> tuple[Array, Exponents, Array]:
    """The log decay from the start of sub-chunks to their middle [..., K], those of tokens relative
    to the middle, and that from there to the end, from sums over all tokens up to one, and
    differences of them. What follows does not depend on which exponent is subtracted, so that it
    has no gradient of its own."""
    if product.rounds:
        # As good as other rounded operands, since all sums have the same ones.
        digits = jnp.finfo(product.dtype)
        log_decay = lax.reduce_precision(log_decay, digits.nexp, digits.nmant)
    upto: Any = _sums_upto(product, log_decay)
    before = upto - log_decay
    enter = lax.stop_gradient(before[..., before.shape[-2] // 2, :])
    middle = enter[..., None, :]
    tokens = Exponents(before - middle, upto - middle, middle - upto)
    return enter, tokens, upto[..., -1, :] - enter


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums_upto(product: Products, x: Array) -> Array:
    """The sums of the tokens up to each [..., T, K]. The transpose of a product that JAX derives
    would be laid out the other way round."""
    i, j = entries(x.shape[-2])
    return sums(product, i >= j, x, rounded=True)


def _sums_upto_backward(product: Products, _: None, dsums: Array) -> tuple[Array]:
    i, j = entries(dsums.shape[-2])
    return (sums(product, i <= j, dsums),)


_sums_upto.defvjp(lambda product, x: (_sums_upto(product, x), None), _sums_upto_backward)


def factors(
    product: Products, exponents: Exponents, reads: Sequence[Read], columns: list[Array]
) -> tuple[Array, Array, Array]:
    """R, C and P as blocks [..., G, T, H, T], which are 0 for a token and a later one, and for a
    token and itself if nothing is read after it. Not so P_uu, where what would be 0 is never used:
    to write zeros takes a GPU time."""
    rows, after = [read.x for read in reads], tuple(read.after for read in reads)
    operands = _Operands(rows, exponents.of(reads), columns, exponents.beyond)
    return _products(product, after, operands)


class _Operands(NamedTuple):
    """Rows and columns [..., T, K], and the exponents of each row and of all columns."""

    rows: list[Array]
    upto: list[Array]
    columns: list[Array]
    beyond: Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(
    product: Products, after: tuple[bool, ...], operands: _Operands
) -> tuple[Array, Array, Array]:
    """The rows and the columns with their factors, and the products of both."""
    return _products_forward(product, after, operands)[0]


def _products_forward(
    product: Products, after: tuple[bool, ...], operands: _Operands
) -> tuple[tuple[Array, Array, Array], Any]:
    rows, upto, columns, beyond = operands
    several = [multiplied(product, x, jnp.exp(e)) for x, e in zip(rows, upto, strict=True)]
    others = [multiplied(product, y, jnp.exp(beyond)) for y in columns]
    x, y = (jnp.concatenate(xs, axis=-2) for xs in (several, others))
    *lead, length, _ = beyond.shape
    shape = (*lead, len(rows), length, len(columns), length)
    if product.minimize_flops:
        found = product("...ik,...jk->...ij", x, y).reshape(shape)
        found = jnp.where(_earlier(after, length), found, 0)
    else:
        # What meets U and what meets V is used apart, and comes from products of its own.
        blocks = [[product.apart("...ik,...jk->...ij", x, y) for y in others] for x in several]
        for row, there in zip(blocks, _earlier(after, length), strict=True):
            first = 0 if row is blocks[-1] else 1
            row[first:] = [jnp.where(there[:, 0], block, 0) for block in row[first:]]
        found = jnp.concatenate([jnp.concatenate(row, axis=-1) for row in blocks], axis=-2)
    return (x, y, found.reshape(shape)), (upto, beyond, x, y)


def _products_backward(
    product: Products,
    after: tuple[bool, ...],
    saved: Any,
    cotangents: tuple[Array, Array, Array],
) -> tuple[_Operands]:
    """What a pair of tokens adds to the gradients of both exponents is of the same size. It cancels
    for the decays that both exponents have, so it is found from the same rounded factors, and is
    not rounded itself."""
    upto, beyond, x, y = saved
    more_dx, more_dy, found = cotangents
    found = jnp.where(_earlier(after, beyond.shape[-2]), found, 0)
    found = found.reshape(*found.shape[:-4], x.shape[-2], y.shape[-2])
    dx = product("...ij,...jk->...ik", found, y, jnp.float32) + more_dx.astype(jnp.float32)
    dy = product("...ij,...ik->...jk", found, x, jnp.float32) + more_dy.astype(jnp.float32)

    def parts(of_all: Array) -> list[Array]:
        return jnp.split(of_all, of_all.shape[-2] // beyond.shape[-2], axis=-2)

    drows = [part * jnp.exp(e) for part, e in zip(parts(dx), upto, strict=True)]
    dcolumns = [part * jnp.exp(beyond) for part in parts(dy)]
    dupto, dbeyond = (parts(dz * z.astype(jnp.float32)) for dz, z in ((dx, x), (dy, y)))
    return (_Operands(drows, dupto, dcolumns, functools.reduce(jnp.add, dbeyond)),)


_products.defvjp(_products_forward, _products_backward)


def _earlier(after: tuple[bool, ...], length: int) -> Array:
    """Which tokens have written before each row reads [G, T, 1, T]."""
    i, j = entries(length)
    return jnp.stack([i >= j if of_row else i > j for of_row in after])[:, :, None, :]
