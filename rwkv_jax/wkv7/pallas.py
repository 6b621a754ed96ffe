"""WKV7 in Pallas kernels: the tile of `operator.py`, and its derivative by hand.

Token i of a tile decays by d_i, and the tokens between j and i, without both, by P[i, j]. S is the
state in the middle of the tile or before it (see `rwkv_jax._pallas.algebra.decays`), S = S_before
diag(entry), and `before` and `after` are decays from there and to there. All of these are
elementwise factors of rows [K].

    A_ij = a_i . P[i, j] b_j            B_ij = a_i . P[i, j] k_j            for j < i
    Q_ij = r_i . d_i P[i, j] b_j        R_ij = r_i . d_i P[i, j] k_j        for j < i
    Q_ii = r_i . b_i                    R_ii = r_i . k_i
    U = (I - A)^-1 ((a before) S^T + B V)                 row i of U is a_i read from its state
    Y = (r d before) S^T + Q U + R V
    S_after = (S diag(stay) + U^T (b after) + V^T (k after)) diag(leave)

In the gradients arrays with V channels are transposed, such as U^T [V, T], because the products
then have the rows of the state.
"""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax._operator.call import Arrays
from rwkv_jax._pallas import algebra
from rwkv_jax._pallas.algebra import Decays, Exponents, Product, Tokens
from rwkv_jax._pallas.kernels import PallasKernels
from rwkv_jax._pallas.walk import Rows
from rwkv_jax._portable import inverses
from rwkv_jax.wkv7.operator import SIGNATURE


class _Pairs(NamedTuple):
    """The matrices of pairs of tokens: B, Q, R and the inverse of I - A."""

    b: Array
    q: Array
    r: Array
    inverse: Array


def _pairs(product: Product, decays: Decays, r: Array, k: Array, a: Array, b: Array) -> _Pairs:
    (a_b, a_k), (r_b, r_k) = algebra.pairs(product, decays.levels, (a, r * decays.own), (b, k))
    r_b += algebra.diagonal(jnp.sum(r * b, axis=1, keepdims=True))
    r_k += algebra.diagonal(jnp.sum(r * k, axis=1, keepdims=True))
    return _Pairs(a_k, r_b, r_k, inverses.by_whole_matrices(product, a_b))


def _prepare(product: Product, decay: str, inputs: Arrays, tokens: Tokens) -> Arrays:
    r, w, k, a, b = (inputs[name].astype(jnp.float32) for name in "rwkab")
    v = inputs["v"]
    log_decay = algebra.log_decay(w, decay, len(r), tokens)
    decays = algebra.decays(product, log_decay, decay, tokens)
    pairs = _pairs(product, decays, r, k, a, b)
    solved = product(pairs.inverse, a * decays.before)
    own = product(pairs.inverse, product(pairs.b, v))
    reads = r * decays.own * decays.before + product(pairs.q, solved)
    return {
        "stay": decays.entry * decays.stay * decays.leave,
        "reads": reads * decays.entry,
        "fresh": product(pairs.q, own) + product(pairs.r, v),
        "keys": k * decays.after * decays.leave,
        "solved": solved * decays.entry,
        "own": own,
        "kept": b * decays.after * decays.leave,
    }


def _gradient(
    product: Product, decay: str, inputs: Arrays, tokens: Tokens, rows: Iterable[Rows]
) -> tuple[Arrays, list[Array]]:
    r, w, k, a, b = (inputs[name].astype(jnp.float32) for name in "rwkab")
    log_decay, pull_back = jax.vjp(lambda w: algebra.log_decay(w, decay, len(r), tokens), w)
    decays = algebra.decays(product, log_decay, decay, tokens)
    own, before, after, entry, stay, leave, levels = decays
    pairs = _pairs(product, decays, r, k, a, b)
    decayed = r * own
    r_start, a_start, b_end, k_end = decayed * before, a * before, b * after, k * after

    def of_rows(v: Array, state: Array, dy: Array, dstate: Array) -> tuple[Arrays, Array]:
        """Sums over these rows, and the gradient of their values."""
        state, dstate = state * entry, dstate * leave
        u = product(state, a_start, (1, 1)) + product(v, pairs.b, (0, 1))
        u = product(u, pairs.inverse, (1, 1))

        du = product(dy, pairs.q, (0, 0)) + product(dstate, b_end, (1, 1))
        dread = product(du, pairs.inverse)
        dv = product(dy, pairs.r, (0, 0)) + product(dstate, k_end, (1, 1))
        dv += product(dread, pairs.b)
        sums = {
            "r_start": product(dy, state),
            "a_start": product(dread, state, (0, 0)),
            "b_end": product(u, dstate, (0, 0)),
            "k_end": product(v, dstate),
            "a_b": product(dread, u, (0, 0)),
            "a_k": product(dread, v, (0, 1)),
            "r_b": product(dy, u),
            "r_k": product(dy, v, (1, 1)),
            "stay": algebra.total(dstate * state) * stay,
        }
        return sums, dv.T

    d, dv = algebra.summed(of_rows(*x) for x in rows)
    d_pairs = (d["a_b"], d["a_k"]), (d["r_b"], d["r_k"])
    (da, ddecayed), (db, dk), d_levels = algebra.pairs_gradient(
        product, levels, (a, decayed), (b, k), d_pairs
    )
    dq, dr = map(algebra.diagonal_of, d_pairs[1])
    ddecayed += d["r_start"] * before
    gradients = {
        "r": ddecayed * own + dq * b + dr * k,
        "k": dk + d["k_end"] * after + dr * r,
        "a": da + d["a_start"] * before,
        "b": db + d["b_end"] * after + dq * r,
    }
    exponents = Exponents(
        own=ddecayed * decayed,
        before=d["r_start"] * r_start + d["a_start"] * a_start,
        after=d["b_end"] * b_end + d["k_end"] * k_end,
        stay=d["stay"],
        levels=d_levels,
    )
    (gradients["w"],) = pull_back(algebra.log_decay_gradient(product, exponents, decay))
    return gradients, dv


IMPLEMENTATION = PallasKernels(SIGNATURE, _prepare, _gradient)
