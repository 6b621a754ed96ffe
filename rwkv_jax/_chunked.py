"""Any block function, run over a whole sequence, and its reverse-mode derivative.

A block function maps `(state, *inputs, *constants)` to `(state, outputs)`, where each input and
output is `[B, L, ...]` for any L >= 1 and a constant is the same for all blocks. Blocks of BLOCK
tokens make chunks of CHUNK. Only the states at chunk boundaries are kept for the backward pass,
which differentiates one chunk at a time, last to first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from rwkv_jax._dispatch import Options

BLOCK = 16

CHUNK = 64
"""Tokens between two saved states; `states[:, n]` is the state before token `n * CHUNK`. The native
kernels have the same number as `kChunk`."""

BlockFn = Callable[..., tuple[Array, Array]]


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
    step: Callable[..., tuple[Array, Array]], state: Array, inputs: Sequence[Array]
) -> tuple[Array, Array]:
    """`(outputs, final state)` of a step that maps one token of `inputs` and the state, its last
    argument, to an output and the next state."""

    def body(state: Array, token: Sequence[Array]) -> tuple[Array, Array]:
        output, state = step(*token, state)
        return state, output

    state, outputs = lax.scan(body, state, [jnp.moveaxis(x, 1, 0) for x in inputs])
    return jnp.moveaxis(outputs, 0, 1), state


def forward(
    block: BlockFn,
    options: Options,
    state: Array,
    inputs: Sequence[Array],
    constants: Sequence[Array] = (),
) -> tuple[Array, Array, Array]:
    """`(outputs, final state, states)`: the states at chunk boundaries [B, N, ...], or N = 0 of
    them if they are not to be saved."""
    dtype = states_dtype(options, inputs[0].dtype)
    outputs, state, states = _pieces(
        lambda state, *inputs: _chunk(block, state, inputs, constants),
        CHUNK,
        state,
        inputs,
        save=dtype if options.save else None,
    )
    return outputs, state, states.astype(dtype)


def backward(
    block: BlockFn,
    states: Array,
    d_outputs: Array,
    d_state: Array,
    inputs: Sequence[Array],
    constants: Sequence[Array] = (),
) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
    """Cotangents of the inputs, of the constants and of the initial state."""
    whole, tail = _split_all((*inputs, d_outputs), CHUNK)
    # In float32, since gradients of all chunks are added up.
    constants32 = tuple(x.astype(jnp.float32) for x in constants)

    def pull_back(sums: Any, state: Array, chunk: list[Array]) -> tuple[Any, tuple[Array, ...]]:
        d_state, d_constants = sums
        *inputs, d_outputs = chunk
        _, vjp = jax.vjp(
            lambda *operands: _chunk(block, *operands),
            *(state.astype(d_state.dtype), tuple(inputs), constants32),
        )
        d_state, d_inputs, more = vjp((d_state, d_outputs))
        return (d_state, jax.tree.map(jnp.add, d_constants, more)), d_inputs

    sums = d_state, jax.tree.map(jnp.zeros_like, constants32)
    d_tail: Sequence[Any] = [None] * len(inputs)
    if tail is not None:
        sums, d_tail = pull_back(sums, states[:, -1], tail)
        states = states[:, :-1]
    sums, d_whole = lax.scan(
        lambda sums, chunk: pull_back(sums, *chunk),
        sums,
        (jnp.moveaxis(states, 1, 0), whole),
        reverse=True,
    )
    d_state, d_constants = sums
    return (
        tuple(map(_join, d_whole, d_tail)),
        tuple(d.astype(x.dtype) for d, x in zip(d_constants, constants, strict=True)),
        d_state,
    )


def _chunk(
    block: BlockFn, state: Array, inputs: Sequence[Array], constants: Sequence[Array]
) -> tuple[Array, Array]:
    outputs, state, _ = _pieces(
        lambda state, *inputs: block(state, *inputs, *constants), BLOCK, state, inputs, save=None
    )
    return state, outputs


def _pieces(
    fn: BlockFn, length: int, state: Array, inputs: Sequence[Array], *, save: Any
) -> tuple[Array, Array, Array]:
    """`fn` on one piece of the inputs after another: `(outputs, final state, states)`, the states
    before each piece in the dtype `save`, none if that is None."""
    whole, tail = _split_all(inputs, length)

    def body(state: Array, piece: list[Array]) -> tuple[Array, Any]:
        after, outputs = fn(state, *piece)
        return after, (outputs, None if save is None else state.astype(save))

    if whole[0].shape[0] or tail is None:
        state, (outputs, saved) = lax.scan(body, state, whole)
        states = state[:, None][:, :0] if save is None else jnp.moveaxis(saved, 0, 1)
        outputs = _join(outputs, None)
    else:
        states, outputs = state[:, None][:, :0].astype(save or state.dtype), None
    if tail is not None:
        if save is not None:
            states = jnp.concatenate([states, state[:, None].astype(save)], axis=1)
        state, last = fn(state, *tail)
        outputs = last if outputs is None else jnp.concatenate([outputs, last], axis=1)
    assert outputs is not None
    return outputs, state, states


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
