"""A sequence over several devices: each has consecutive tokens, in the order of a mesh axis.

What a run of tokens does to a state is summarized in a map of about its size (`segments.py` of each
operator). Each device summarizes its own tokens; the devices exchange the maps, and each finds the
state before its tokens and runs the operator from there. In the backward pass they exchange what
their own tokens add to the gradient of that state, so that nothing whose size depends on the number
of tokens crosses devices either way. The gradients of the inputs are then those of the operator
itself, which needs no derivative of the summaries.

On each device the tokens are cut into parts by the same rule, which run side by side as if they
were sequences of a larger batch [B, P] and give few heads more of a large GPU.

Everything here runs inside `shard_map`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax import _dispatch
from rwkv_jax._chunked import CHUNK
from rwkv_jax._dispatch import Options

Arrays = tuple[Array, ...]

ENOUGH = 512
"""Heads of all sequences together that need no more parts."""

PART = 8 * CHUNK
"""Tokens of a part, at least."""


def run(operator: Any, options: Options, axis: Any, *operands: Array) -> Arrays:
    """`y` of the tokens of this device, and the state after those of all, the same everywhere. The
    initial state, too, is that of the whole sequence."""
    if options.implementation == "reference":
        # Kept for a derivative are the operands alone: of everything else some is not used, on
        # which the partitioner of jaxlib 0.11 crashes.
        forward = functools.partial(_forward, operator, operator.reference, options, axis)
        y, *after = jax.checkpoint(lambda *xs: forward(xs)[0])(*operands)
    else:
        results: Arrays = _run(operator, options, axis, *operands)
        y, *after = results
    is_last = lax.axis_index(axis) == lax.axis_size(axis) - 1
    return y, *(lax.psum(jnp.where(is_last, x, jnp.zeros_like(x)), axis) for x in after)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _run(operator: Any, options: Options, axis: Any, *operands: Array) -> Arrays:
    """`y` and the state after the tokens of this device."""
    results, *_ = _forward(operator, operator.forward, options, axis, operands)
    return results[: 1 + len(operator.state)]


def _run_forward(operator: Any, options: Options, axis: Any, *operands: Array) -> Any:
    saving = dataclasses.replace(options, save=True)
    results, *residuals = _forward(operator, operator.forward, saving, axis, operands)
    count = 1 + len(operator.state)
    return results[:count], (results[count:], *residuals)


def _run_backward(
    operator: Any, options: Options, axis: Any, residuals: Any, cotangents: Arrays
) -> tuple[Array | None, ...]:
    saved, inputs, of_parts, of_devices, marks = residuals
    dy, *dend = cotangents
    cut = _Cut(operator.backward.operands, of_parts[1][0].shape[1])
    given = *inputs, *saved, cut(dy, "dy")

    def pull_back(stage: Any, dafter: Arrays) -> Arrays:
        """From the gradients of the states after the parts, [B, P, ...]."""
        operands = *given, *map(_flat, dafter), *marks
        return _dispatch.call(stage.of(operands), options, *operands)

    def chain(maps_and_states: Any, own: Arrays, after: Arrays) -> tuple[Arrays, Arrays]:
        """The gradients of the state before and after each of some runs of tokens [n, ...], from
        what the runs themselves add and from that of the state after all."""

        def before(dafter: Arrays, run: Any) -> tuple[Arrays, Arrays]:
            (summary, state), own = run
            _, vjp = jax.vjp(functools.partial(operator.segments.apply, summary), state)
            return jax.tree.map(jnp.add, own, *vjp(dafter)), dafter

        return lax.scan(before, after, (maps_and_states, own), reverse=True, unroll=8)

    def last(x: Array) -> Array:
        return jnp.pad(x[:, None], [(0, 0), (cut.parts - 1, 0)] + [(0, 0)] * (x.ndim - 1))

    ends = tuple(map(last, dend))
    own = _first(map(cut.open, pull_back(operator.reverse_summary, ends)))
    none = tuple(map(jnp.zeros_like, dend))
    own_of_device, _ = chain(_first(of_parts), own, none)
    dinitial, later = chain(of_devices, lax.all_gather(own_of_device, axis), none)
    index = lax.axis_index(axis)
    _, dafter = chain(_first(of_parts), own, _at(later, index))
    dafter = tuple(jnp.moveaxis(x, 0, 1) + end for x, end in zip(dafter, ends, strict=True))
    found = pull_back(operator.backward, dafter)[: len(inputs)]
    dinputs = [cut.undo(x, name) for x, name in zip(found, operator.inputs, strict=True)]
    # It is that of the whole sequence: one device hands it on, since the caller adds them up.
    dinitial = tuple(jnp.where(index == 0, x, jnp.zeros_like(x)) for x in dinitial)
    return *dinputs, *dinitial, *[None] * len(marks)


_run.defvjp(_run_forward, _run_backward)


def _forward(
    operator: Any, stage: Any, options: Options, axis: Any, operands: Sequence[Array]
) -> tuple[Arrays, Arrays, Any, Any, Arrays]:
    """`y` and the state after the tokens of this device, and whatever else the stage gives of the
    parts; the inputs of the parts; the maps of the parts and the states before them, [B, P, ...];
    the same of the devices, [devices, B, ...]; and the marks of the parts, if there are any."""
    combine, apply = operator.segments.combine, operator.segments.apply
    stage, summary = stage.of(operands), operator.summary
    count, tokens = len(operator.inputs), operands[list(operator.inputs).index("k")].shape[1]
    initial, marks = tuple(operands[count:][: len(operator.state)]), ()
    cut = _Cut(stage.operands, _parts(initial[0], tokens))
    inputs = tuple(map(cut, operands[:count], operator.inputs))
    if "marks" in stage.operands:
        summary, marks = summary.marked, (cut(operands[-1], "marks"),)
    summing = dataclasses.replace(options, save=False)
    maps = tuple(map(cut.open, _dispatch.call(summary, summing, *inputs, *marks)))
    upto = lax.associative_scan(combine, maps, axis=1)
    all_maps = lax.all_gather(tuple(x[:, -1] for x in upto), axis)
    _, starts = lax.scan(lambda state, x: (apply(x, state), state), initial, all_maps, unroll=8)
    start = tuple(x[:, None] for x in _at(starts, lax.axis_index(axis)))
    later = apply(tuple(x[:, :-1] for x in upto), start)
    states = tuple(jnp.concatenate(x, axis=1) for x in zip(start, later, strict=True))
    y, *rest = _dispatch.call(stage, options, *inputs, *map(_flat, states), *marks)
    after = [cut.open(x)[:, -1] for x in rest[: len(initial)]]
    results = cut.undo(y, "v"), *after, *rest[len(initial) :]
    return results, inputs, (maps, states), (all_maps, starts), marks


def _parts(state: Array, tokens: int) -> int:
    """Into how many parts to cut the tokens of a device: whole chunks, the same for all."""
    most = min(ENOUGH // max(state.shape[0] * state.shape[1], 1), tokens // PART)
    return next((n for n in range(most, 1, -1) if tokens % (n * CHUNK) == 0), 1)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Takes operands [B, T, ...] apart into parts [B * P, T / P, ...]; what has no axis T is the
    same for all parts."""

    axes: Mapping[str, str]
    parts: int

    def __call__(self, x: Array, name: str) -> Array:
        if "T" in self.axes[name]:
            return x.reshape(len(x) * self.parts, x.shape[1] // self.parts, *x.shape[2:])
        return jnp.repeat(x, self.parts, axis=0)

    def undo(self, x: Array, name: str) -> Array:
        """A gradient of an operand, from those of the parts."""
        if "T" in self.axes[name]:
            return x.reshape(len(x) // self.parts, x.shape[1] * self.parts, *x.shape[2:])
        return jnp.sum(self.open(x), axis=1)

    def open(self, x: Array) -> Array:
        """[B * P, ...] as [B, P, ...]."""
        return x.reshape(len(x) // self.parts, self.parts, *x.shape[1:])


def _flat(x: Array) -> Array:
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _first(tree: Any) -> Any:
    """[B, P, ...] as [P, B, ...]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tuple(tree))


def _at(tree: Any, index: Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)
