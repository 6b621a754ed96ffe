"""What a run of tokens of WKV5 and WKV6 does to a state.

The tokens take the state S [V, K] of a head to S diag(d) + D, where d is the product of their decay
factors and D the run from S = 0.
"""

from typing import ClassVar

import jax.numpy as jnp

from rwkv_jax._operator.call import Arrays, Forward, Marks, Options
from rwkv_jax._operator.implementation import ForwardFn, Summary
from rwkv_jax._operator.partition import alike
from rwkv_jax._packing import segments
from rwkv_jax._portable.decay import unbounded_log_decay


class _Summary(Summary):
    """`factor` is d and `added` is D."""

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
        (zeros, _) = alike(["BHVK", "BTHK"], zeros, k)
        result = forward(Forward(operands.inputs, {"state": zeros}, operands.packing))
        return {"factor": jnp.exp(total), "added": result.state["state"]}

    def apply(self, summary: Arrays, state: Arrays) -> Arrays:
        return {"state": state["state"] * summary["factor"][..., None, :] + summary["added"]}

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        added = self.apply(second, {"state": first["added"]})["state"]
        return {"factor": first["factor"] * second["factor"], "added": added}


SUMMARY = _Summary()
