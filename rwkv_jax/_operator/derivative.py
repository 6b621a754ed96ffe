"""The derivative of an operator on whole sequences and on one token."""

import functools
from typing import Literal, NamedTuple

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from rwkv_jax._operator import dispatch
from rwkv_jax._operator.call import Arrays, Backward, Forward, Options, Packing
from rwkv_jax._operator.operator import Operator

YAndState = tuple[Array, Arrays]

KEPT = "rwkv_jax"
"""The name of the results of forward passes for `jax.checkpoint_policies`: a policy that saves it
keeps the backward pass from running the forward pass again."""


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass."""

    inputs: Arrays
    states: Arrays
    packing: Packing


def _run(
    operator: Operator, name: Literal["forward", "step"], options: Options, operands: Forward
) -> YAndState:
    result = dispatch.run(operator, name, options, operands)
    return result.y, result.state


def sequence(operator: Operator, options: Options, operands: Forward) -> YAndState:
    """`y` and the final state."""
    if options.implementation == "reference":
        return _run(operator, "forward", options, operands)
    return _sequence(operator, options, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sequence(operator: Operator, options: Options, operands: Forward) -> YAndState:
    return _run(operator, "forward", options, operands)


def _sequence_forward(
    operator: Operator, options: Options, operands: Forward
) -> tuple[YAndState, Residuals]:
    result = dispatch.run(operator, "forward", options.saving(True), operands)
    result = jax.tree.map(lambda x: checkpoint_name(x, KEPT), result)
    return (result.y, result.state), Residuals(operands.inputs, result.states, operands.packing)


def _sequence_backward(
    operator: Operator, options: Options, residuals: Residuals, cotangents: YAndState
) -> tuple[Forward]:
    operands = Backward(residuals.inputs, residuals.states, *cotangents, residuals.packing)
    found = dispatch.run(operator, "backward", options, operands)
    return (Forward(found.inputs, found.state),)


_sequence.defvjp(_sequence_forward, _sequence_backward)


def token(operator: Operator, options: Options, operands: Forward) -> YAndState:
    """`y` and the next state of one token."""
    if options.implementation == "reference":
        return _run(operator, "step", options, operands)
    return _token(operator, options, operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _token(operator: Operator, options: Options, operands: Forward) -> YAndState:
    return _run(operator, "step", options, operands)


def _token_forward(
    operator: Operator, options: Options, operands: Forward
) -> tuple[YAndState, Forward]:
    return _token(operator, options, operands), operands


def _token_backward(
    operator: Operator, options: Options, operands: Forward, cotangents: YAndState
) -> tuple[Forward]:
    """The gradient of a sequence of one token, whose only saved state is the one before it."""
    dy, dstate = cotangents
    timed = operator.signature.timed

    def of_sequence(name: str, x: Array) -> Array:
        return x[:, None] if name in timed else x

    inputs = {name: of_sequence(name, x) for name, x in operands.inputs.items()}
    states = {part: x[:, None] for part, x in operands.state.items()}
    found = dispatch.run(
        operator, "backward", options, Backward(inputs, states, dy[:, None], dstate)
    )
    dinputs = {name: x[:, 0] if name in timed else x for name, x in found.inputs.items()}
    return (Forward(dinputs, found.state),)


_token.defvjp(_token_forward, _token_backward)
