"""WKV6 in Pallas kernels: the chunk form of `xla.py`, and its derivative by hand.

With the decays of `rwkv_jax.wkv7.pallas` as elementwise factors of rows [K], and S the state before
a chunk of L tokens:

    R_ij = r_i . P[i, j] k_j    for j < i,    R_ii = r_i . u k_i
    Y = (r before) S^T + R V
    S <- S diag(whole) + V^T (k after)

`w` may be that of each token [L, K], or one for all [1, K], which is what WKV5 has.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _pallas
from rwkv_jax._dispatch import Options
from rwkv_jax._pallas import Decays, Exponents, Named, Product
from rwkv_jax._typing import Keys, State, States, TokenKeys, Values
from rwkv_jax.wkv6 import xla

why_not, how = _pallas.why_not, _pallas.how
step = xla.step


def _pairs(product: Product, decays: Decays, r: Array, k: Array, u: Array) -> Array:
    ((pairs,),) = _pallas.pairs(product, decays.levels, (r,), (k,))
    return pairs + _pallas.diagonal(jnp.sum(r * u * k, axis=1, keepdims=True))


def _chunk(
    options: Options, inputs: Named, state: Array, valid: Array | None
) -> tuple[Array, Array]:
    product = _pallas.product(options, inputs["r"].dtype)
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    v = inputs["v"]
    log_decay = _pallas.log_decay(w, options.decay, valid)
    decays = _pallas.decays(product, log_decay, options.decay)
    pairs = _pairs(product, decays, r, k, u)
    y = product(state, r * decays.before, (1, 1)) + product(v, pairs, (0, 1))
    return y, state * decays.whole + product(v, k * decays.after, (0, 0))


def _gradient(
    options: Options, inputs: Named, state: Array, dy: Array, dstate: Array, valid: Array | None
) -> tuple[Named, Array]:
    product = _pallas.product(options, inputs["r"].dtype)
    r, w, k, u = (inputs[name].astype(jnp.float32) for name in "rwku")
    v = inputs["v"]
    log_decay, pull_back = jax.vjp(lambda w: _pallas.log_decay(w, options.decay, valid), w)
    decays = _pallas.decays(product, log_decay, options.decay)
    _, before, after, whole, levels = decays
    r_start, k_end = r * before, k * after
    dr_start, dk_end = product(dy, state), product(v, dstate)

    pairs = _pairs(product, decays, r, k, u)
    d_pairs = product(dy, v, (1, 1))
    (dr,), (dk,), d_levels = _pallas.pairs_gradient(product, levels, (r,), (k,), ((d_pairs,),))
    own = _pallas.diagonal_of(d_pairs)
    exponents = Exponents(
        own=jnp.zeros_like(log_decay),
        before=dr_start * r_start,
        after=dk_end * k_end,
        whole=jnp.sum(dstate * state, axis=0, keepdims=True) * whole,
        levels=d_levels,
    )
    (dw,) = pull_back(_pallas.log_decay_gradient(product, exponents, options.decay))
    gradients = {
        "r": dr + dr_start * before + own * u * k,
        "w": dw,
        "k": dk + dk_end * after + own * u * r,
        "v": (product(dy, pairs, (0, 0)) + product(dstate, k_end, (1, 1))).T,
        "u": jnp.sum(own * r * k, axis=0, keepdims=True),
    }
    return gradients, dstate * whole + product(dy, r_start, (0, 0))


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Array,
    k: Keys,
    v: Values,
    u: TokenKeys,
    initial_state: State,
) -> tuple[Values, State, States]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    chunk = functools.partial(_chunk, options)
    return _pallas.forward(chunk, options, platform, inputs, initial_state)


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
) -> tuple[Keys, Array, Keys, Values, TokenKeys, State]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "u": u}
    chunk, gradient = functools.partial(_chunk, options), functools.partial(_gradient, options)
    dr, dw, dk, dv, du, dinitial_state = _pallas.backward(
        chunk, gradient, options, platform, inputs, states, dy, dfinal_state
    )
    return dr, dw, dk, dv, du, dinitial_state
