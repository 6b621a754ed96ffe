"""Any chunk function, run over a whole sequence, and its reverse-mode derivative.

A chunk function maps `(state, *inputs)` to `(state, outputs)`, where each input and output is
`[B, L, ...]` for any L >= 1. Only the states at chunk boundaries are kept for the backward pass,
which differentiates one chunk at a time, last to first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

ChunkFn = Callable[..., tuple[Array, Array]]


def boundaries(tokens: int, length: int) -> int:
    """How many states a sequence saves: one before each chunk, also before a short last one."""
    return -(-tokens // length)


def _split(x: Array, length: int) -> tuple[Array, Array]:
    """The whole chunks of `x` [B, T, ...] as [n, B, length, ...], and the tokens left over."""
    whole = x.shape[1] // length
    head, tail = x[:, : whole * length], x[:, whole * length :]
    return jnp.moveaxis(head.reshape(x.shape[0], whole, length, *x.shape[2:]), 1, 0), tail


def _join(whole: Array, tail: Array | None) -> Array:
    """The inverse of `_split`."""
    chunks, batch, length, *rest = whole.shape
    head = jnp.moveaxis(whole, 0, 1).reshape(batch, chunks * length, *rest)
    return head if tail is None else jnp.concatenate([head, tail], axis=1)


def _split_all(xs: Sequence[Array], length: int) -> tuple[list[Array], list[Array] | None]:
    whole, tails = zip(*(_split(x, length) for x in xs), strict=True)
    return list(whole), list(tails) if tails[0].shape[1] else None


def forward(
    chunk_fn: ChunkFn, length: int, state: Array, inputs: Sequence[Array], *, save: Any
) -> tuple[Array, Array, Array]:
    """`(outputs, final state, states)`: the states at chunk boundaries [B, N, ...] in the dtype
    `save`, or N = 0 of them if that is None."""
    whole, tail = _split_all(inputs, length)

    def body(state: Array, chunk: list[Array]) -> tuple[Array, Any]:
        after, outputs = chunk_fn(state, *chunk)
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
        state, last = chunk_fn(state, *tail)
        outputs = last if outputs is None else jnp.concatenate([outputs, last], axis=1)
    assert outputs is not None
    return outputs, state, states


def backward(
    chunk_fn: ChunkFn,
    length: int,
    states: Array,
    inputs: Sequence[Array],
    d_outputs: Array,
    d_state: Array,
) -> tuple[tuple[Array, ...], Array]:
    """Cotangents of the inputs and of the initial state."""
    whole, tail = _split_all((*inputs, d_outputs), length)

    def pull_back(d_state: Array, state: Array, chunk: list[Array]) -> tuple[Array, list[Array]]:
        *inputs, d_outputs = chunk
        _, vjp = jax.vjp(chunk_fn, state.astype(d_state.dtype), *inputs)
        d_state, *d_inputs = vjp((d_state, d_outputs))
        return d_state, d_inputs

    d_tail: list[Any] = [None] * len(inputs)
    if tail is not None:
        d_state, d_tail = pull_back(d_state, states[:, -1], tail)
        states = states[:, :-1]
    d_state, d_whole = lax.scan(
        lambda d_state, chunk: pull_back(d_state, *chunk),
        d_state,
        (jnp.moveaxis(states, 1, 0), whole),
        reverse=True,
    )
    return tuple(map(_join, d_whole, d_tail)), d_state
