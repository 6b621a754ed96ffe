"""WKV6 in Pallas kernels: the chunk form of `xla.py`, and its derivative by hand.

With the letters of `rwkv_jax.wkv7.pallas`, and decays that are not bounded, so that S is the state
before the chunk:

    R_ij = r_i . P[i, j] k_j    for j < i,    R_ii = r_i . u k_i
    Y = (r before) S^T + R V
    S_after = S diag(stay) + V^T (k after)

`w` may be that of each token [L, K], or one for all [1, K], which is what WKV5 has.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _pallas
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._pallas import Decays, Exponents, Named, Product, Tokens
from rwkv_jax._typing import Keys, State, States, TokenKeys, Values
from rwkv_jax.wkv6 import xla

why_not, how = _pallas.why_not, _pallas.how
step = xla.step


def _pairs(product: Product, decays: Decays, r: Array, k: Array, u: Array) -> Array:
    ((pairs,),) = _pallas.pairs(product, decays.levels, (r,), (k,))
    return pairs + _pallas.diagonal(jnp.sum(r * u * k, axis=1, keepdims=True))


def _prepare(product: Product, decay: str, inputs: Named, tokens: Tokens) -> Named:
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    decays = _pallas.decays(product, _pallas.log_decay(w, decay, len(r), tokens), decay, tokens)
    return {
        "stay": decays.stay,
        "reads": r * decays.before,
        "fresh": product(_pairs(product, decays, r, k, u), inputs["v"]),
        "keys": k * decays.after,
    }


def _gradient(
    product: Product,
    decay: str,
    inputs: Named,
    state: Array,
    dy: Array,
    dstate: Array,
    tokens: Tokens,
) -> Named:
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    v = inputs["v"]
    log_decay, pull_back = jax.vjp(lambda w: _pallas.log_decay(w, decay, len(r), tokens), w)
    decays = _pallas.decays(product, log_decay, decay, tokens)
    r_start, k_end = r * decays.before, k * decays.after
    dr_start, dk_end = product(dy, state), product(v, dstate)

    pairs = _pairs(product, decays, r, k, u)
    d_pairs = product(dy, v, (1, 1))
    (dr,), (dk,), d_levels = _pallas.pairs_gradient(
        product, decays.levels, (r,), (k,), ((d_pairs,),)
    )
    bonus = _pallas.diagonal_of(d_pairs)
    exponents = Exponents(
        own=jnp.zeros_like(r),
        before=dr_start * r_start,
        after=dk_end * k_end,
        stay=_pallas.total(dstate * state) * decays.stay,
        levels=d_levels,
    )
    (dw,) = pull_back(_pallas.log_decay_gradient(product, exponents, decay))
    return {
        "r": dr + dr_start * decays.before + bonus * u * k,
        "w": dw,
        "k": dk + dk_end * decays.after + bonus * u * r,
        "v": (product(dy, pairs, (0, 0)) + product(dstate, k_end, (1, 1))).T,
        "u": _pallas.total(bonus * r * k),
    }


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State, States]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    product = _pallas.product(options, r.dtype)
    prepare = functools.partial(_prepare, product, options.decay)
    return _pallas.forward(prepare, options, platform, inputs, initial_state, marks)


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
) -> tuple[Keys, Array, Keys, Values, TokenKeys, State]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    product = _pallas.product(options, r.dtype)
    prepare = functools.partial(_prepare, product, options.decay)
    gradient = functools.partial(_gradient, product, options.decay)
    dr, dw, dk, dv, du, dinitial_state = _pallas.backward(
        prepare, gradient, options, platform, inputs, states, dy, dfinal_state, marks
    )
    return dr, dw, dk, dv, du, dinitial_state
