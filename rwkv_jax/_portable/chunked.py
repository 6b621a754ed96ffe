"""An implementation of any operator in plain `jax.numpy` from one function of a tile.

A tile function takes the state and the inputs of L tokens, for any L >= 1, and gives the state
after them and their `y`. Tiles of TILE tokens make chunks of CHUNK. Only the states before each
chunk are kept for the backward pass, which differentiates one chunk at a time, last to first.
"""

import functools
from collections.abc import Callable, Mapping
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
    Options,
    Packing,
    Result,
)
from rwkv_jax._operator.implementation import Implementation
from rwkv_jax._operator.saved import CHUNK
from rwkv_jax._operator.signature import Signature
from rwkv_jax._packing import segments
from rwkv_jax._portable.token_by_token import TokenByToken

TILE = 16

TileFn: TypeAlias = Callable[[Options, Arrays, Arrays, Array | None], tuple[Arrays, Array]]
"""`tile(options, state, inputs, marks)`: the state after some tokens and their `y` [B, L, ...].
Inputs of tokens are [B, L, ...], parameters [B, ...]; `marks` [B, L] is None where each row is one
sequence."""

Run: TypeAlias = Callable[[Arrays, Arrays, Array | None], tuple[Arrays, Array]]
"""The same for a run of tokens, of the inputs that tokens have."""


class Chunked(Implementation):
    """Runs everywhere, for any sizes. One token is computed as `reference` does it."""

    def __init__(self, signature: Signature, tile: TileFn, reference: TokenByToken) -> None:
        self._signature, self._tile, self._reference = signature, tile, reference

    def describe(
        self, platform: str, options: Options, inputs: Mapping[str, Any], packing: Packing
    ) -> str:
        return "chunks in plain jax.numpy"

    def step(self, options: Options, platform: str, operands: Forward) -> Result:
        return self._reference.step(options, platform, operands)

    def forward(self, options: Options, platform: str, operands: Forward) -> Result:
        timed, shared, marks = self._taken_apart(operands)
        save_as = self._signature.states_dtype(options, operands.inputs)
        y, state, states = _pieces(
            functools.partial(_chunk, self._run(options, shared)),
            CHUNK,
            operands.state,
            timed,
            marks,
            save=save_as if options.save else None,
        )
        return Result(y, state, states)

    def backward(self, options: Options, platform: str, operands: Backward) -> Gradients:
        timed, shared, marks = self._taken_apart(operands)
        (dy,) = segments.cleared(marks, [operands.dy])
        whole, tail = _split((timed, dy, marks), CHUNK)
        # In float32, since the gradients of all chunks are added up.
        shared32 = _cast(shared, jnp.float32)

        def pull_back(sums: Any, states: Arrays, chunk: Any) -> tuple[Any, Arrays]:
            dstate, dshared = sums
            timed, dy, marks = chunk

            def run(state: Arrays, timed: Arrays, shared: Arrays) -> tuple[Arrays, Array]:
                return _chunk(self._run(options, shared), state, timed, marks)

            _, vjp = jax.vjp(run, _cast(states, jnp.float32), timed, shared32)
            dstate, dtimed, more = vjp((dstate, dy))
            return (dstate, jax.tree.map(jnp.add, dshared, more)), dtimed

        sums = operands.dstate, jax.tree.map(jnp.zeros_like, shared32)
        states, dtail = operands.states, None
        if tail is not None:
            sums, dtail = pull_back(sums, jax.tree.map(lambda x: x[:, -1], states), tail)
            states = jax.tree.map(lambda x: x[:, :-1], states)
        before = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), states)
        (dstate, dshared), dwhole = lax.scan(
            lambda sums, chunk: pull_back(sums, *chunk), sums, (before, whole), reverse=True
        )
        dshared = {name: dx.astype(shared[name].dtype) for name, dx in dshared.items()}
        return Gradients(_joined(dwhole, dtail) | dshared, dstate)

    def _taken_apart(self, operands: Forward | Backward) -> tuple[Arrays, Arrays, Array | None]:
        """The inputs that tokens have, with zeros for padding, the parameters, and the marks."""
        signature, inputs = self._signature, operands.inputs
        marks = operands.packing.marks if isinstance(operands.packing, Marks) else None
        cleared = segments.cleared(marks, [inputs[name] for name in signature.timed])
        timed = dict(zip(signature.timed, cleared, strict=True))
        return timed, {name: inputs[name] for name in signature.shared}, marks

    def _run(self, options: Options, shared: Arrays) -> Run:
        return lambda state, timed, marks: self._tile(options, state, timed | shared, marks)


def _chunk(run: Run, state: Arrays, timed: Arrays, marks: Array | None) -> tuple[Arrays, Array]:
    """A chunk, tile by tile."""
    y, state, _ = _pieces(run, TILE, state, timed, marks, save=None)
    return state, y


def _pieces(
    run: Run, length: int, state: Arrays, timed: Arrays, marks: Array | None, *, save: Any
) -> tuple[Array, Arrays, Arrays]:
    """`run` on one piece of tokens after another: `y`, the final state, and in the dtype `save` the
    states before each piece, none if that is None."""
    whole, tail = _split((timed, marks), length)

    def body(state: Arrays, piece: tuple[Arrays, Array | None]) -> tuple[Arrays, Any]:
        after, y = run(state, *piece)
        return after, (y, {} if save is None else _cast(state, save))

    y, states = None, {}
    if jax.tree.leaves(whole)[0].shape[0] or tail is None:
        state, (y, saved) = lax.scan(body, state, whole)
        y = _joined(y, None)
        states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), saved)
    if tail is not None:
        if save is not None:
            last = jax.tree.map(lambda x: x[:, None], _cast(state, save))
            states = jax.tree.map(_behind, states, last) if states else last
        state, rest = run(state, *tail)
        y = rest if y is None else _behind(y, rest)
    assert y is not None
    return y, state, states


def _cast(arrays: Arrays, dtype: Any) -> Arrays:
    return jax.tree.map(lambda x: x.astype(dtype), arrays)


def _behind(x: Array, y: Array) -> Array:
    return jnp.concatenate([x, y], axis=1)


def _split(xs: Any, length: int) -> tuple[Any, Any]:
    """The whole pieces of arrays [B, T, ...] as [n, B, length, ...], and the tokens left over, None
    if there are none."""

    def pieces(x: Array) -> Array:
        count = x.shape[1] // length
        head = x[:, : count * length].reshape(x.shape[0], count, length, *x.shape[2:])
        return jnp.moveaxis(head, 1, 0)

    tokens = jax.tree.leaves(xs)[0].shape[1]
    tail = jax.tree.map(lambda x: x[:, tokens - tokens % length :], xs)
    return jax.tree.map(pieces, xs), tail if tokens % length else None


def _joined(whole: Any, tail: Any) -> Any:
    """The inverse of `_split`."""

    def head(x: Array) -> Array:
        pieces, batch, length, *rest = x.shape
        return jnp.moveaxis(x, 0, 1).reshape(batch, pieces * length, *rest)

    joined = jax.tree.map(head, whole)
    return joined if tail is None else jax.tree.map(_behind, joined, tail)
