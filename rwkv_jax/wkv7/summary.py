"""What a run of tokens of WKV7 does to a state.

The tokens take the state S [V, K] of a head to S M + D, where D [V, K] is the run from S = 0 and
M [K, K] the run from S = I with v = 0.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import Arrays, Forward, Options
from rwkv_jax._operator.implementation import ForwardFn, Summary
from rwkv_jax._operator.partition import alike


class _Summary(Summary):
    """`factor` is M and `added` is D. (The letter L is a second K.)"""

    axes: ClassVar = {"factor": "BHLK", "added": "BHVK"}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        k, v = operands.inputs["k"], operands.inputs["v"]
        batch, _, heads, size = k.shape

        def run(v: Array, start: Array) -> Array:
            (start, _) = alike(["BHVK", "BTHK"], start, k)
            inputs = operands.inputs | {"v": v}
            return forward(Forward(inputs, {"state": start}, operands.packing)).state["state"]

        identity = jnp.broadcast_to(jnp.eye(size), (batch, heads, size, size))
        zeros = jnp.zeros((batch, heads, v.shape[-1], size))
        return {"factor": run(jnp.zeros_like(k), identity), "added": run(v, zeros)}

    def apply(self, summary: Arrays, state: Arrays) -> Arrays:
        return {"state": _times(state["state"], summary["factor"]) + summary["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": _times(first["factor"], second["factor"]), "added": added}


def _times(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


SUMMARY = _Summary()
