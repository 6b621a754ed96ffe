"""Any block function, run over a whole sequence, and its reverse-mode derivative.

A block function maps `(state, *inputs, *constants)` to `(state, outputs)`, where each input and
output is `[B, L, ...]` for any L >= 1, a constant is the same for all blocks, and the state is an
array or a tuple of them. Of several sequences in a row it gets the marks by name. Blocks of BLOCK
tokens make chunks of CHUNK. Only the states at chunk boundaries are kept for the backward pass,
which differentiates one chunk at a time, last to first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax import _packing
from rwkv_jax._dispatch import Options

BLOCK = 16

CHUNK = 64
"""Tokens between two saved states; `states[:, n]` is the state before token `n * CHUNK`. The native
kernels have the same number as `kChunk`."""

BlockFn = Callable[..., tuple[Any, Array]]


def boundaries(tokens: int) -> int:
    """How many states a sequence saves: one before each chunk, also before a short last one."""
    return -(-tokens // CHUNK)


def states_dtype(options: Options, dtype: Any) -> Any:
    """The dtype of saved states for inputs of a dtype. For 16-bit inputs float32 states would take
    as much memory as two inputs with K = 64, four with 128; their rounding costs no more than that
    of an input."""
    exact = dtype == jnp.float32 or options.precision == lax.Precision.HIGHEST
    return jnp.float32 if exact else jnp.bfloat16


def token_by_token(
    step: Callable[..., tuple[Array, Any]],
    state: Any,
    inputs: Sequence[Array],
    marks: Array | None = None,
    empty: float | tuple[float, ...] = 0.0,
) -> tuple[Array, Any]:
    """`(outputs, final state)` of a step that maps one token of `inputs` and the state, its last
    argument, to an output and the next state. Where a segment starts, the state is `empty`."""

    def choose(condition: Array, x: Any, y: Any) -> Any:
        def one(x: Array, y: Array) -> Array:
            return jnp.where(condition.reshape(-1, *[1] * (x.ndim - 1)), x, y)

        return jax.tree.map(one, x, y)

    def body(state: Any, token: Sequence[Array]) -> tuple[Any, Array]:
        if marks is None:
            output, state = step(*token, state)
            return state, output
        *token, mark = token
        new = jax.tree.map(lambda x, value: jnp.full_like(x, value), state, empty)
        before = choose(mark == _packing.STARTS, new, state)
        output, after = step(*token, before)
        there = mark != _packing.ABSENT
        return choose(there, after, before), choose(there, output, jnp.zeros_like(output))

    tokens = _packing.cleared(marks, inputs) + ([] if marks is None else [marks])
    state, outputs = lax.scan(body, state, [jnp.moveaxis(x, 1, 0) for x in tokens])
    return jnp.moveaxis(outputs, 0, 1), state


def forward(
    block: BlockFn,
    state: Any,
    inputs: Sequence[Array],
    constants: Sequence[Array] = (),
    marks: Array | None = None,
    *,
    save: bool,
    save_as: Any = jnp.float32,
) -> tuple[Array, Any, Any]:
    """`(outputs, final state, states)`: the states at chunk boundaries [B, N, ...], or N = 0 of
    them if they are not to be saved."""
    outputs, state, states = _pieces(
        lambda state, inputs, marks: _chunk(block, state, inputs, constants, marks),
        CHUNK,
        state,
        _packing.cleared(marks, inputs),
        marks,
        save=save_as if save else None,
    )
    return outputs, state, _cast(states, save_as)


def backward(
    block: BlockFn,
    states: Any,
    d_outputs: Array,
    d_state: Any,
    inputs: Sequence[Array],
    constants: Sequence[Array] = (),
    marks: Array | None = None,
) -> tuple[tuple[Array, ...], tuple[Array, ...], Any]:
    """Cotangents of the inputs, of the constants and of the initial state."""
    given = _packing.cleared(marks, (*inputs, d_outputs))
    whole, tail = _split_all(given if marks is None else (*given, marks), CHUNK)
    # In float32, since gradients of all chunks are added up.
    constants32 = tuple(x.astype(jnp.float32) for x in constants)

    def pull_back(sums: Any, state: Any, chunk: list[Array]) -> tuple[Any, tuple[Array, ...]]:
        d_state, d_constants = sums
        *inputs, d_outputs = chunk if marks is None else chunk[:-1]
        own = None if marks is None else chunk[-1]
        _, vjp = jax.vjp(
            lambda state, inputs, constants: _chunk(block, state, inputs, constants, own),
            *(_cast(state, jnp.float32), tuple(inputs), constants32),
        )
        d_state, d_inputs, more = vjp((d_state, d_outputs))
        return (d_state, jax.tree.map(jnp.add, d_constants, more)), d_inputs

    sums = d_state, jax.tree.map(jnp.zeros_like, constants32)
    d_tail: Sequence[Any] = [None] * len(inputs)
    if tail is not None:
        sums, d_tail = pull_back(sums, jax.tree.map(lambda x: x[:, -1], states), tail)
        states = jax.tree.map(lambda x: x[:, :-1], states)
    sums, d_whole = lax.scan(
        lambda sums, chunk: pull_back(sums, *chunk),
        sums,
        (jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), states), whole),
        reverse=True,
    )
    d_state, d_constants = sums
    return (
        tuple(map(_join, d_whole, d_tail)),
        tuple(d.astype(x.dtype) for d, x in zip(d_constants, constants, strict=True)),
        d_state,
    )


def _chunk(
    block: BlockFn,
    state: Any,
    inputs: Sequence[Array],
    constants: Sequence[Array],
    marks: Array | None,
) -> tuple[Any, Array]:
    def run(state: Any, inputs: Sequence[Array], marks: Array | None) -> tuple[Any, Array]:
        return block(state, *inputs, *constants, **({} if marks is None else {"marks": marks}))

    outputs, state, _ = _pieces(run, BLOCK, state, inputs, marks, save=None)
    return state, outputs


def _pieces(
    fn: Callable[..., tuple[Any, Array]],
    length: int,
    state: Any,
    inputs: Sequence[Array],
    marks: Array | None,
    *,
    save: Any,
) -> tuple[Array, Any, Any]:
    """`fn(state, inputs, marks)` on one piece after another: `(outputs, final state, states)`, the
    states before each piece in the dtype `save`, none if that is None."""
    whole, tail = _split_all(inputs if marks is None else (*inputs, marks), length)

    def step(state: Any, piece: Sequence[Array]) -> tuple[Any, Array]:
        return fn(state, piece, None) if marks is None else fn(state, piece[:-1], piece[-1])

    def body(state: Any, piece: list[Array]) -> tuple[Any, Any]:
        after, outputs = step(state, piece)
        return after, (outputs, None if save is None else _cast(state, save))

    outputs, states = None, jax.tree.map(lambda x: x[:, None][:, :0], state)
    if whole[0].shape[0] or tail is None:
        state, (outputs, saved) = lax.scan(body, state, whole)
        outputs = _join(outputs, None)
        if save is not None:
            states = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), saved)
    if tail is not None:
        if save is not None:
            states = jax.tree.map(
                lambda xs, x: jnp.concatenate([xs, x[:, None]], axis=1),
                *(_cast(states, save), _cast(state, save)),
            )
        state, last = step(state, tail)
        outputs = last if outputs is None else jnp.concatenate([outputs, last], axis=1)
    assert outputs is not None
    return outputs, state, states


def _cast(state: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), state)


def _split(x: Array, length: int) -> tuple[Array, Array]:
    """The whole pieces of `x` [B, T, ...] as [n, B, length, ...], and the tokens left over."""
    whole = x.shape[1] // length
    head, tail = x[:, : whole * length], x[:, whole * length :]
    return jnp.moveaxis(head.reshape(x.shape[0], whole, length, *x.shape[2:]), 1, 0), tail


def _join(whole: Array, tail: Array | None) -> Array:
    """The inverse of `_split`."""
    pieces, batch, length, *rest = whole.shape
    head = jnp.moveaxis(whole, 0, 1).reshape(batch, pieces * length, *rest)
    return head if tail is None else jnp.concatenate([head, tail], axis=1)


def _split_all(xs: Sequence[Array], length: int) -> tuple[list[Array], list[Array] | None]:
    whole, tails = zip(*(_split(x, length) for x in xs), strict=True)
    return list(whole), list(tails) if tails[0].shape[1] else None
