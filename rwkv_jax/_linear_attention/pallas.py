"""WKV5 and WKV6 in Pallas kernels: the tile of `recurrence.py`, and its derivative by hand.

S is the state before a tile, and P[i, j] the decay of the tokens between j and i, without both.
`before` and `after` are the decays of the tokens before and after each token of the tile.

    R_ij = r_i . P[i, j] k_j    for j < i,    R_ii = r_i . u k_i
    Y = (r before) S^T + R V
    S_after = S diag(stay) + V^T (k after)

`w` is [T, K], or [1, K] where all tokens share it. Its decays are not bounded, so that `entry` and
`leave` of `rwkv_jax._pallas.algebra.Decays` are 1.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator.call import Arrays
from rwkv_jax._pallas import algebra
from rwkv_jax._pallas.algebra import Decays, Exponents, Product, Tokens
from rwkv_jax._pallas.walk import Rows


def prepare(product: Product, decay: str, inputs: Arrays, tokens: Tokens) -> Arrays:
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    log_decay = algebra.log_decay(w, decay, len(r), tokens)
    decays = algebra.decays(product, log_decay, decay, tokens)
    return {
        "stay": decays.stay,
        "reads": r * decays.before,
        "fresh": product(_pairs(product, decays, r, k, u), inputs["v"]),
        "keys": k * decays.after,
    }


def gradient(
    product: Product, decay: str, inputs: Arrays, tokens: Tokens, rows: Iterable[Rows]
) -> tuple[Arrays, list[Array]]:
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    log_decay, pull_back = jax.vjp(lambda w: algebra.log_decay(w, decay, len(r), tokens), w)
    decays = algebra.decays(product, log_decay, decay, tokens)
    r_start, k_end = r * decays.before, k * decays.after
    pairs = _pairs(product, decays, r, k, u)

    def of_rows(v: Array, state: Array, dy: Array, dstate: Array) -> tuple[Arrays, Array]:
        """Sums over these rows, and the gradient of their values."""
        sums = {
            "r_start": product(dy, state),
            "k_end": product(v, dstate),
            "pairs": product(dy, v, (1, 1)),
            "stay": algebra.total(dstate * state) * decays.stay,
        }
        return sums, (product(dy, pairs, (0, 0)) + product(dstate, k_end, (1, 1))).T

    d, dv = algebra.summed(of_rows(*x) for x in rows)
    (dr,), (dk,), d_levels = algebra.pairs_gradient(
        product, decays.levels, (r,), (k,), ((d["pairs"],),)
    )
    bonus = algebra.diagonal_of(d["pairs"])
    exponents = Exponents(
        own=jnp.zeros_like(r),
        before=d["r_start"] * r_start,
        after=d["k_end"] * k_end,
        stay=d["stay"],
        levels=d_levels,
    )
    (dw,) = pull_back(algebra.log_decay_gradient(product, exponents, decay))
    gradients = {
        "r": dr + d["r_start"] * decays.before + bonus * u * k,
        "w": dw,
        "k": dk + d["k_end"] * decays.after + bonus * u * r,
        "u": algebra.total(bonus * r * k),
    }
    return gradients, dv


def _pairs(product: Product, decays: Decays, r: Array, k: Array, u: Array) -> Array:
    """R."""
    ((pairs,),) = algebra.pairs(product, decays.levels, (r,), (k,))
    return pairs + algebra.diagonal(jnp.sum(r * u * k, axis=1, keepdims=True))
