"""A sequence over several devices: each has consecutive tokens, in the order of a mesh axis.

Each device computes what its own tokens do to a state: a map of about the size of a state (the
`Transition` of each operator). The devices exchange the transitions, and each finds the state
before its tokens and runs the operator from there. In the backward pass they exchange what their
own tokens add to the cotangent of that state, so nothing whose size depends on the number of tokens
crosses devices in either pass. The gradients of the inputs are then those of the operator itself,
which needs no derivative of the transitions.

On each device the same rule cuts the tokens into splits, which run side by side as if they were
rows of a larger batch, and so give few heads more of a large GPU.

Everything here runs inside `shard_map`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._operator import check, dispatch
from rwkv_jax._operator.call import CHUNK, Arrays, Backward, Forward, Marks, Options, Packing
from rwkv_jax._operator.operator import Operator, YAndState
from rwkv_jax._operator.signature import Signature

ENOUGH_HEADS = 512
"""Rows times heads, over all splits, that keep a large GPU busy without more splits."""

SPLIT_TOKENS = 8 * CHUNK
"""The fewest tokens of a split."""


def run(operator: Operator, options: Options, axis: Any, operands: Forward) -> YAndState:
    """`y` of the tokens of this device, and the state after all tokens, the same on all devices.
    The initial state, too, is that of the whole sequence."""
    if options.implementation == "reference":
        # The operands alone are kept for the derivative: the partitioner of jaxlib 0.11 crashes on
        # residuals of which some are not used.
        forward = functools.partial(_forward, operator, options, axis)
        result: YAndState = jax.checkpoint(lambda operands: forward(operands)[0])(operands)
    else:
        result = _run(operator, options, axis, operands)
    y, state = result
    is_last = lax.axis_index(axis) == lax.axis_size(axis) - 1

    def of_last(x: Array) -> Array:
        return lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), axis)

    return y, jax.tree.map(of_last, state)


class _Residuals(NamedTuple):
    """What the backward pass needs.

    inputs, states, packing: of the splits, as rows of a batch.
    splits: the transitions of the splits and the states before them [B, splits, ...].
    devices: the same of the devices [devices, B, ...].
    """

    inputs: Arrays
    states: Arrays
    packing: Packing
    splits: tuple[Arrays, Arrays]
    devices: tuple[Arrays, Arrays]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(operator: Operator, options: Options, axis: Any, operands: Forward) -> YAndState:
    """`y` and the state after the tokens of this device."""
    result, _ = _forward(operator, options, axis, operands)
    return result


def _run_forward(
    operator: Operator, options: Options, axis: Any, operands: Forward
) -> tuple[YAndState, _Residuals]:
    return _forward(operator, dataclasses.replace(options, save=True), axis, operands)


def _run_backward(
    operator: Operator, options: Options, axis: Any, residuals: _Residuals, cotangents: YAndState
) -> tuple[Forward]:
    inputs, states, packing, of_splits, of_devices = residuals
    dy, dend = cotangents
    cut = _Splits(operator.signature, jax.tree.leaves(of_splits)[0].shape[1])

    def operands(dafter: Arrays) -> Backward:
        """From the cotangents of the states after the splits [B, splits, ...]."""
        return Backward(inputs, states, cut.tokens(dy), jax.tree.map(_flat, dafter), packing)

    def chain(
        transitions_and_states: tuple[Arrays, Arrays], own: Arrays, after: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The cotangents of the state before and after each of some runs of tokens [n, ...], from
        what the runs themselves add and from the cotangent of the state after all."""

        def before(dafter: Arrays, run: Any) -> tuple[Arrays, Arrays]:
            (transition, state), own = run
            _, vjp = jax.vjp(functools.partial(operator.transition.apply, transition), state)
            return jax.tree.map(jnp.add, own, *vjp(dafter)), dafter

        return lax.scan(before, after, (transitions_and_states, own), reverse=True, unroll=8)

    def last(x: Array) -> Array:
        return jnp.pad(x[:, None], [(0, 0), (cut.count - 1, 0)] + [(0, 0)] * (x.ndim - 1))

    ends = jax.tree.map(last, dend)
    own = dispatch.run(operator, "reverse_transition", options, operands(ends))
    own = _first(jax.tree.map(cut.open, own))
    zeros = jax.tree.map(jnp.zeros_like, dend)
    own_of_device, _ = chain(_first(of_splits), own, zeros)
    dinitial, later = chain(of_devices, lax.all_gather(own_of_device, axis), zeros)
    index = lax.axis_index(axis)
    _, dafter = chain(_first(of_splits), own, _at(later, index))
    dafter = jax.tree.map(lambda x, end: jnp.moveaxis(x, 0, 1) + end, dafter, ends)
    found = dispatch.run(operator, "backward", options, operands(dafter))
    # It is that of the whole sequence: one device hands it on, since the caller adds them up.
    dinitial = jax.tree.map(lambda x: jnp.where(index == 0, x, jnp.zeros_like(x)), dinitial)
    return (Forward(cut.undo(found.inputs), dinitial),)


_run.defvjp(_run_forward, _run_backward)


def _forward(
    operator: Operator, options: Options, axis: Any, operands: Forward
) -> tuple[YAndState, _Residuals]:
    """`y` and the state after the tokens of this device, and what the backward pass needs."""
    transition, initial = operator.transition, operands.state
    tokens = operands.inputs[operator.signature.per_token[0]].shape[1]
    cut = _Splits(operator.signature, _count(operator.signature, initial, tokens))
    inputs = cut(operands.inputs)
    packing = operands.packing
    if isinstance(packing, Marks):
        packing = Marks(cut.tokens(packing.marks))
    run = Forward(inputs, {}, packing)
    found = dispatch.run(operator, "transition", dataclasses.replace(options, save=False), run)
    transitions = jax.tree.map(cut.open, found)
    upto = lax.associative_scan(transition.combine, transitions, axis=1)
    of_devices = lax.all_gather(jax.tree.map(lambda x: x[:, -1], upto), axis)
    _, starts = lax.scan(lambda s, x: (transition.apply(x, s), s), initial, of_devices, unroll=8)
    before = jax.tree.map(lambda x: x[:, None], _at(starts, lax.axis_index(axis)))
    if cut.count > 1:
        later = transition.apply(jax.tree.map(lambda x: x[:, :-1], upto), before)
        before = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), before, later)
    splits = Forward(inputs, jax.tree.map(_flat, before), packing)
    result = dispatch.run(operator, "forward", options, splits)
    end = jax.tree.map(lambda x: cut.open(x)[:, -1], result.state)
    residuals = _Residuals(
        inputs, result.states, packing, (transitions, before), (of_devices, starts)
    )
    return (cut.whole(result.y), end), residuals


def _count(signature: Signature, state: Arrays, tokens: int) -> int:
    """How many splits, of whole chunks and all of the same length, the tokens of a device make."""
    sizes = check.sizes(signature.state, state)
    rows = max(sizes["B"] * sizes.get("H", sizes.get("C", 1)), 1)
    most = min(ENOUGH_HEADS // rows, tokens // SPLIT_TOKENS)
    return next((n for n in range(most, 1, -1) if tokens % (n * CHUNK) == 0), 1)


class _Splits:
    """Takes operands [B, T, ...] apart into [B * count, T / count, ...]; an operand without the
    axis T is the same for all splits."""

    def __init__(self, signature: Signature, count: int) -> None:
        self._signature, self.count = signature, count

    def __call__(self, inputs: Arrays) -> Arrays:
        per_token = {name: self.tokens(inputs[name]) for name in self._signature.per_token}
        shared = self._signature.shared
        return per_token | {name: jnp.repeat(inputs[name], self.count, axis=0) for name in shared}

    def undo(self, gradients: Arrays) -> Arrays:
        """The gradients of the inputs, from those of the splits."""
        per_token = {name: self.whole(gradients[name]) for name in self._signature.per_token}
        shared = self._signature.shared
        return per_token | {name: jnp.sum(self.open(gradients[name]), axis=1) for name in shared}

    def tokens(self, x: Array) -> Array:
        return x.reshape(len(x) * self.count, x.shape[1] // self.count, *x.shape[2:])

    def whole(self, x: Array) -> Array:
        return x.reshape(len(x) // self.count, x.shape[1] * self.count, *x.shape[2:])

    def open(self, x: Array) -> Array:
        """[B * count, ...] as [B, count, ...]."""
        return x.reshape(len(x) // self.count, self.count, *x.shape[1:])


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _first(tree: Any) -> Any:
    """[B, n, ...] as [n, B, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tree)


def _at(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
