"""WKV7 in Pallas kernels: the chunk form of `xla.py`, and its derivative by hand.

Token i of a chunk of L decays by d_i, and those between j and i, without both, by P[i, j]. S is the
state in the middle of the chunk (or before it: see `_pallas.decays`), S = S_before diag(entry), and
`before` and `after` are decays from and to there. All these are elementwise factors of rows [K].

    A_ij = a_i . P[i, j] b_j            B_ij = a_i . P[i, j] k_j            for j < i
    Q_ij = r_i . d_i P[i, j] b_j        R_ij = r_i . d_i P[i, j] k_j        for j < i
    Q_ii = r_i . b_i                    R_ii = r_i . k_i
    U = (I - A)^-1 ((a before) S^T + B V)                 row i of U is a_i read from its state
    Y = (r d before) S^T + Q U + R V
    S_after = (S diag(stay) + U^T (b after) + V^T (k after)) diag(leave)

What has V channels is transposed here, U^T [V, L], since products then have the rows of the state.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rwkv_jax import _pallas
from rwkv_jax._dispatch import Options
from rwkv_jax._packing import Marks
from rwkv_jax._pallas import Decays, Exponents, Named, Product, Tokens
from rwkv_jax._typing import Keys, State, States, Values
from rwkv_jax.wkv7 import xla

why_not, how = _pallas.why_not, _pallas.how
step = xla.step


class _Pairs(NamedTuple):
    """What pairs of tokens have to do with each other: B, Q, R and the inverse of I - A."""

    b: Array
    q: Array
    r: Array
    inverse: Array


def _pairs(product: Product, decays: Decays, inputs: Named) -> _Pairs:
    r, k, a, b = (inputs[name] for name in "rkab")
    (a_b, a_k), (r_b, r_k) = _pallas.pairs(product, decays.levels, (a, r * decays.own), (b, k))
    r_b += _pallas.diagonal(jnp.sum(r * b, axis=1, keepdims=True))
    r_k += _pallas.diagonal(jnp.sum(r * k, axis=1, keepdims=True))
    return _Pairs(a_k, r_b, r_k, _pallas.inverse(product, a_b))


def _float32(inputs: Named) -> Named:
    return {name: x if name == "v" else x.astype(jnp.float32) for name, x in inputs.items()}


def _prepare(product: Product, decay: str, inputs: Named, tokens: Tokens) -> Named:
    inputs = _float32(inputs)
    r, w, k, v, a, b = (inputs[name] for name in "rwkvab")
    decays = _pallas.decays(product, _pallas.log_decay(w, decay, len(r), tokens), decay, tokens)
    pairs = _pairs(product, decays, inputs)
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
    product: Product,
    decay: str,
    inputs: Named,
    state: Array,
    dy: Array,
    dstate: Array,
    tokens: Tokens,
) -> Named:
    inputs = _float32(inputs)
    r, w, k, v, a, b = (inputs[name] for name in "rwkvab")
    log_decay, pull_back = jax.vjp(lambda w: _pallas.log_decay(w, decay, len(r), tokens), w)
    decays = _pallas.decays(product, log_decay, decay, tokens)
    own, before, after, entry, stay, leave, levels = decays
    state, dstate = state * entry, dstate * leave
    pairs = _pairs(product, decays, inputs)
    decayed = r * own
    r_start, a_start, b_end, k_end = decayed * before, a * before, b * after, k * after
    u = product(state, a_start, (1, 1)) + product(v, pairs.b, (0, 1))
    u = product(u, pairs.inverse, (1, 1))

    du = product(dy, pairs.q, (0, 0)) + product(dstate, b_end, (1, 1))
    dread = product(du, pairs.inverse)
    dv = product(dy, pairs.r, (0, 0)) + product(dstate, k_end, (1, 1)) + product(dread, pairs.b)
    dr_start, da_start = product(dy, state), product(dread, state, (0, 0))
    db_end, dk_end = product(u, dstate, (0, 0)), product(v, dstate)

    d_pairs = (
        (product(dread, u, (0, 0)), product(dread, v, (0, 1))),
        (product(dy, u), product(dy, v, (1, 1))),
    )
    (da, ddecayed), (db, dk), d_levels = _pallas.pairs_gradient(
        product, levels, (a, decayed), (b, k), d_pairs
    )
    dq, dr = map(_pallas.diagonal_of, d_pairs[1])
    ddecayed += dr_start * before
    gradients = {
        "r": ddecayed * own + dq * b + dr * k,
        "k": dk + dk_end * after + dr * r,
        "v": dv.T,
        "a": da + da_start * before,
        "b": db + db_end * after + dq * r,
    }
    exponents = Exponents(
        own=ddecayed * decayed,
        before=dr_start * r_start + da_start * a_start,
        after=db_end * b_end + dk_end * k_end,
        stay=_pallas.total(dstate * state) * stay,
        levels=d_levels,
    )
    (gradients["w"],) = pull_back(_pallas.log_decay_gradient(product, exponents, decay))
    return gradients


def forward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    initial_state: State,
    marks: Marks | None = None,
) -> tuple[Values, State, States]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    product = _pallas.product(options, r.dtype)
    prepare = functools.partial(_prepare, product, options.decay)
    return _pallas.forward(prepare, options, platform, inputs, initial_state, marks)


def backward(
    options: Options,
    platform: str,
    r: Keys,
    w: Keys,
    k: Keys,
    v: Values,
    a: Keys,
    b: Keys,
    states: States,
    dy: Values,
    dfinal_state: State,
    marks: Marks | None = None,
) -> tuple[Keys, Keys, Keys, Values, Keys, Keys, State]:
    inputs = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
    product = _pallas.product(options, r.dtype)
    prepare = functools.partial(_prepare, product, options.decay)
    gradient = functools.partial(_gradient, product, options.decay)
    dr, dw, dk, dv, da, db, dinitial_state = _pallas.backward(
        prepare, gradient, options, platform, inputs, states, dy, dfinal_state, marks
    )
    return dr, dw, dk, dv, da, db, dinitial_state
