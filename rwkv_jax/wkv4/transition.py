"""What a run of tokens of WKV4 does to a state: it decays the sums before it and adds its own."""

from typing import ClassVar

import jax.numpy as jnp

from rwkv_jax._operator.call import Arrays, Forward, Marks, Options
from rwkv_jax._operator.implementation import ForwardFn, Transition
from rwkv_jax._operator.partition import match_shardings
from rwkv_jax._packing import segments
from rwkv_jax._portable.decay import unbounded_log_decay
from rwkv_jax.wkv4.reference import add
from rwkv_jax.wkv4.signature import SIGNATURE


class _Transition(Transition):
    """`log_decay` is that of all tokens together; the rest is the state after them from the state
    before any token."""

    axes: ClassVar = {"log_decay": "BC", **SIGNATURE.state}

    def of(self, forward: ForwardFn, options: Options, operands: Forward) -> Arrays:
        w, k = operands.inputs["w"], operands.inputs["k"]
        empty = SIGNATURE.empty_state(SIGNATURE.sizes(operands.inputs))
        parts = match_shardings([*["BC"] * len(empty), "BTC"], *empty.values(), k)
        start = dict(zip(empty, parts, strict=False))
        result = forward(Forward(operands.inputs, start, operands.packing))
        log_decay = unbounded_log_decay(w, options.decay)
        if isinstance(operands.packing, Marks):
            each = jnp.broadcast_to(log_decay[:, None], k.shape)
            total = segments.total(operands.packing.marks, each)
        else:
            total = k.shape[1] * log_decay
        return {"log_decay": total, **result.state}

    def apply(self, transition: Arrays, state: Arrays) -> Arrays:
        return add(state, transition["log_decay"], transition)

    def combine(self, first: Arrays, second: Arrays) -> Arrays:
        log_decay = first["log_decay"] + second["log_decay"]
        return {"log_decay": log_decay, **self.apply(second, first)}


TRANSITION = _Transition()
