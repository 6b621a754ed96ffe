"""The reference implementation of any operator: one `lax.scan` step, which JAX differentiates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator.call import (
    Arrays,
    Backward,
    Forward,
    Gradients,
    Marks,
    Operands,
    Options,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments

StepFn: TypeAlias = Callable[[Options, Arrays, Arrays], tuple[Array, Arrays]]
"""`step(options, inputs, state)` of one token: `y` and the next state."""


@dataclass(frozen=True, eq=False)
class TokenByToken(Implementation):
    """The recurrence as its definition has it. It is the specification of an operator."""

    signature: Signature
    step_of: StepFn
    has_step = True

    def describe(self, options: Options, platform: str, operands: Operands) -> str:
        return "lax.scan, one token at a time in float32"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        y, state = self.step_of(options, operands.inputs, operands.state)
        return Result(y, state, {})

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        signature, inputs = self.signature, operands.inputs
        marks = operands.packing.marks if isinstance(operands.packing, Marks) else None
        shared = {name: inputs[name] for name in signature.shared}

        def step(state: Arrays, token: Arrays) -> tuple[Arrays, Array]:
            y, state = self.step_of(options, token | shared, state)
            return state, y

        def marked(state: Arrays, token: tuple[Arrays, Array]) -> tuple[Arrays, Array]:
            per_token, mark = token
            empty = {p: jnp.full_like(x, signature.empty.get(p, 0.0)) for p, x in state.items()}
            before = _choose(mark == segments.STARTS, empty, state)
            after, y = step(before, per_token)
            there = mark != segments.PADDING
            return _choose(there, after, before), _choose(there, y, jnp.zeros_like(y))

        names = signature.per_token
        cleared = segments.cleared(marks, [inputs[name] for name in names])
        per_token = {name: jnp.moveaxis(x, 1, 0) for name, x in zip(names, cleared, strict=True)}
        if marks is None:
            state, y = lax.scan(step, operands.state, per_token)
        else:
            state, y = lax.scan(marked, operands.state, (per_token, jnp.moveaxis(marks, 1, 0)))
        return Result(jnp.moveaxis(y, 0, 1), state, {})

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        raise NotImplementedError("JAX differentiates the forward pass of the reference")


def _choose(condition: Array, xs: Any, ys: Any) -> Any:
    """`xs` in the rows [B] where the condition holds, `ys` elsewhere."""

    def one(x: Array, y: Array) -> Array:
        return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(one, xs, ys)
