"""What WKV5 and WKV6 have in common: the recurrence one token at a time, the terms of a token for
plain XLA, what a run of tokens does to a state, and the implementations.

In a sub-chunk of tokens of plain XLA, with P[i, j] the decay of the tokens between j and i, without
both (see `rwkv_jax._portable.algebra`), `before` that of the tokens before one, and `after` that of
those after it:

    R_ij = r_i . (P[i, j] k_j)  for j < i,    R_ii = r_i . (u k_i)
    Y = (r before) S^T + R V
    S_after = S diag(stay) + V^T (k after)
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._native.kernels import HEAD_SIZES, NativeKernels
from rwkv_jax._operator.call import Arrays, Forward, Marks, Options
from rwkv_jax._operator.implementation import ForwardFn, Transition
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.partition import match_shardings
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.decay import decay_factor, unbounded_log_decay
from rwkv_jax._portable.terms import Read, Terms
from rwkv_jax._portable.token_by_token import TokenByToken


def step(options: Options, inputs: Arrays, state: Arrays) -> tuple[Array, Arrays]:
    """y = (S + v (u * k)^T) r, then S = S diag(d) + v k^T."""
    d = decay_factor(inputs["w"], options.decay)
    r, k, v, u = (inputs[name].astype(jnp.float32) for name in "rkvu")
    s = state["state"]
    y = _apply(s + _outer(v, u * k), r)
    return y.astype(inputs["v"].dtype), {"state": s * d[:, :, None, :] + _outer(v, k)}


def _apply(state: Array, x: Array) -> Array:
    return jnp.einsum("bhvk,bhk->bhv", state, x, precision=lax.Precision.HIGHEST)


def _outer(v: Array, k: Array) -> Array:
    return v[..., None] * k[:, :, None, :]


def terms(inputs: Arrays) -> Terms:
    r, k, u = (inputs[name] for name in "rku")
    return Terms([Read(r, now=r * u)], [k])


class _Transition(Transition):
    """The tokens take the state S [V, K] of a head to S diag(d) + D, where d, `factor`, is the
    product of their decay factors and D, `added`, the run from S = 0."""

    axes: ClassVar = {"factor": "BHK", "added": "BHVK"}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        w, k, v = (operands.inputs[name] for name in "wkv")
        batch, tokens, heads, size = v.shape
        marks = operands.packing.marks if isinstance(operands.packing, Marks) else None
        constant = w.ndim < k.ndim  # as WKV5 has it
        if not constant:
            (w,) = segments.cleared(marks, [w])
        log_decay = unbounded_log_decay(w, options.decay)
        if marks is not None:
            each = jnp.broadcast_to(log_decay[:, None] if constant else log_decay, k.shape)
            total = segments.total(marks, each)
        else:
            total = tokens * log_decay if constant else jnp.sum(log_decay, axis=1)
        zeros = jnp.zeros((batch, heads, size, k.shape[-1]))
        (zeros, _) = match_shardings(["BHVK", "BTHK"], zeros, k)
        result = forward(Forward(operands.inputs, {"state": zeros}, operands.packing))
        return {"factor": jnp.exp(total), "added": result.state["state"]}

    def apply(self, transition: Arrays, state: Arrays) -> Arrays:
        return {"state": state["state"] * transition["factor"][..., None, :] + transition["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": first["factor"] * second["factor"], "added": added}


def operator(signature: Signature) -> Operator:
    """The operator with these operands, whose kernels of Pallas are in its own folder."""
    return Operator(
        signature,
        _Transition(),
        implementations={
            "ffi": NativeKernels(signature, head_sizes=HEAD_SIZES),
            "pallas": f"rwkv_jax.{signature.name}.pallas",
            "xla": Chain(signature, terms),
            "reference": TokenByToken(signature, step),
        },
    )
