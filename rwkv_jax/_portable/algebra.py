"""The arithmetic of many sub-chunks side by side: decays between tokens, and pairs of tokens.

Arrays of sub-chunks are [..., T, K], [..., T, V] or, for pairs of tokens, [..., T, T], where T is
the number of tokens of a sub-chunk, a power of two, and all sub-chunks are batch axes of few, large
products.

Where the log decay of a token is bounded, two factors of each token are enough
(`rwkv_jax._portable.bounded`). Otherwise the decay between two tokens is a product of factors that
depend on how far they are apart (`rwkv_jax._portable.pieces`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._portable import bounded, pieces
from rwkv_jax._portable.decay import BOUNDED, LOG_DECAY, NO_DECAY
from rwkv_jax._portable.products import Products, entries, stacked
from rwkv_jax._portable.terms import Read


class Tokens(NamedTuple):
    """The tokens of sub-chunks [..., T].

    there: whether each is there, that is, neither padding nor behind the end; None if all are.
    segment: the number of the segment of each, where 0 continues from the state before the
      sub-chunk; None if all tokens belong to that one.
    """

    there: Array | None = None
    segment: Array | None = None


class Decays(NamedTuple):
    """The decays of sub-chunks: those of a bounded form relative to the middle of sub-chunks.

    log_decay: of each token [..., T, K].
    exponents: of what leads to each token and from it; None if not bounded.
    enter: the log decay from the start to the middle [..., K]; None if not bounded.
    stay: the factor of what states keep besides `enter` and `leave` [..., K]; None if all of it.
    leave: the log decay from the middle to the end [..., K]; None if not bounded.
    """

    log_decay: Array
    exponents: bounded.Exponents | None
    enter: Array | None
    stay: Array | None
    leave: Array | None


class Factors(NamedTuple):
    """What G reads and H columns make of a sub-chunk: R [..., G T, K] and C [..., H T, K], with the
    factors that lead to a token and from it, and P [..., G T, H T], for pairs of tokens."""

    rows: Array
    columns: Array
    pairs: Array


def decays(w: Array, decay: str, tokens: Tokens, product: Products) -> Decays:
    """The decays of sub-chunks, from `w` of each token [..., T, K]."""
    if tokens.there is not None:
        # Here, and not below, where XLA would choose anew for each of the sums that it computes.
        w = jnp.where(tokens.there[..., None], w, NO_DECAY[decay])
    log_decay = LOG_DECAY[decay](w)
    # The gradient of the decay of a token alone is exactly 0 if the state before it is. Differences
    # of sums would leave a rounding error.
    if decay in BOUNDED and log_decay.shape[-2] > 1:
        enter, exponents, leave = bounded.exponents(product, log_decay)
        result = Decays(log_decay, exponents, enter, None, leave)
    else:
        result = Decays(log_decay, None, None, jnp.exp(jnp.sum(log_decay, axis=-2)), None)
    if tokens.segment is None:
        return result
    goes_on = tokens.segment[..., -1:] == 0
    stay = jnp.ones_like(w[..., 0, :]) if result.stay is None else result.stay
    return result._replace(stay=jnp.where(goes_on, stay, 0.0))


def factors(
    product: Products, decays: Decays, tokens: Tokens, reads: Sequence[Read], columns: list[Array]
) -> Factors:
    """The factors. P has for each x that is read and y of `columns` a block: x_i . (decay between i
    and j) y_j where j < i, and 0 where j > i. If x is read after the token, its decay is part of
    that between i and j, and x_i . y_i is on the diagonal; else z_i . y_i is, with z the `now` of
    the read. Of P_uu only what is below the diagonal counts."""
    *lead, length, _ = columns[0].shape
    if decays.exponents is None:
        x, y, pairs = pieces.factors(product, decays.log_decay, reads, columns)
        now = [read.x if read.after else read.now for read in reads]
    else:
        x, y, pairs = bounded.factors(product, decays.exponents, reads, columns)
        now = [None if read.after else read.now for read in reads]
    if (segment := tokens.segment) is not None:
        x = _where(segment == 0, x)
        y = _where(segment == segment[..., -1:], y)
        same = segment[..., None, :, None, None] == segment[..., None, None, None, :]
        pairs = jnp.where(same, pairs, 0)
    if any(z is not None for z in now):
        own = stacked([stacked([_same_token(z, y) for y in columns], -1) for z in now], -3)
        i, j = entries(length)
        pairs = jnp.where((i == j)[:, None, :], pairs + own[..., None].astype(pairs.dtype), pairs)
    return Factors(x, y, pairs.reshape(*lead, len(reads) * length, len(columns) * length))


def _where(chosen: Array, x: Array) -> Array:
    """`x` [..., n T, K] where tokens [..., T] are chosen, and else 0."""
    several = x.shape[-2] // chosen.shape[-1]
    chosen = jnp.concatenate([chosen] * several, axis=-1)
    return jnp.where(chosen[..., None], x, 0)


def _same_token(z: Array | None, y: Array) -> Array:
    """z_i . y_i [..., T]."""
    if z is None:
        return jnp.zeros_like(y[..., 0])
    return jnp.einsum("...tk,...tk->...t", z, y, precision=lax.Precision.HIGHEST)
