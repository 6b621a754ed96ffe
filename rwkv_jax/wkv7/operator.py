"""The operator WKV7: its operands, the recurrence, what a run of tokens does to a state, and its
implementations.

In plain XLA the recurrence is solved at once for a sub-chunk of tokens. With P[i, j] the decay of
tokens between j and i, without both (see `rwkv_jax._portable.algebra`), `before` that of the tokens
before one, and `after` that of the tokens after it:

    A_ij = a_i . (P[i, j] b_j)          B_ij = a_i . (P[i, j] k_j)          for j < i
    Q_ij = r_i . (d_i P[i, j] b_j)      R_ij = r_i . (d_i P[i, j] k_j)      for j < i
    Q_ii = r_i . b_i                    R_ii = r_i . k_i
    U = (I - A)^-1 ((a before) S^T + B V)                    row i of U is S_{i-1} a_i
    Y = (r d before) S^T + Q U + R V
    S_after = S diag(stay) + U^T (b after) + V^T (k after)
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._native.kernels import HEAD_SIZES, NativeKernels
from rwkv_jax._operator.call import Arrays, Forward, Options
from rwkv_jax._operator.implementation import ForwardFn, Transition
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.partition import match_shardings
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.decay import NO_DECAY, decay_factor
from rwkv_jax._portable.terms import Read, Terms
from rwkv_jax._portable.token_by_token import TokenByToken

SIGNATURE = Signature(
    "wkv7",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTHK", "b": "BTHK"},
    y="v",
    state={"state": "BHVK"},
    identity_token={"w": NO_DECAY},
    decays=("log", "exp", "sigmoid"),
)


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """S = S diag(d) + (S a) b^T + v k^T, then y = S r."""
    d = decay_factor(inputs["w"], options.decay)
    r, k, v, a, b = (inputs[name].astype(jnp.float32) for name in "rkvab")
    s = state["state"]
    s = (
        s * d[:, :, None, :]
        + _apply(s, a)[..., None] * b[:, :, None, :]
        + v[..., None] * k[:, :, None, :]
    )
    return _apply(s, r).astype(inputs["v"].dtype), {"state": s}


def _apply(state: Array, x: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def terms(inputs: Arrays) -> Terms:
    """The terms of a token, from which plain XLA makes the parts of a sub-chunk."""
    r, k, a, b = (inputs[name] for name in "rkab")
    return Terms([Read(a), Read(r, after=True)], [b, k])


class _Transition(Transition):
    """The tokens take the state S [V, K] of a head to S M + D, where D [V, K], `added`, is the run
    from S = 0 and M [K, K], `factor`, the run from S = I with v = 0. (The letter L is a second K.)
    """

    axes: ClassVar = {"factor": "BHLK", "added": "BHVK"}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        k, v = operands.inputs["k"], operands.inputs["v"]
        batch, _, heads, size = k.shape

        def run(v: Array, start: Array) -> Array:
            (start, _) = match_shardings(["BHVK", "BTHK"], start, k)
            inputs = operands.inputs | {"v": v}
            return forward(Forward(inputs, {"state": start}, operands.packing)).state["state"]

        identity = jnp.broadcast_to(jnp.eye(size), (batch, heads, size, size))
        zeros = jnp.zeros((batch, heads, v.shape[-1], size))
        return {"factor": run(jnp.zeros_like(k), identity), "added": run(v, zeros)}

    def apply(self, transition: Arrays, state: Arrays) -> Arrays:
        return {"state": _times(state["state"], transition["factor"]) + transition["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": _times(first["factor"], second["factor"]), "added": added}


def _times(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


OPERATOR = Operator(
    SIGNATURE,
    _Transition(),
    implementations={
        "ffi": NativeKernels(SIGNATURE, head_sizes=HEAD_SIZES, shares_keys=True),
        "pallas": "rwkv_jax.wkv7.pallas",
        "xla": Chain(SIGNATURE, terms),
        "reference": TokenByToken(SIGNATURE, step),
    },
)
