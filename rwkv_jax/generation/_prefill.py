"""Reading prompts: any lengths of prompts with a few compiled programs and little memory.

Prompts are read in prefill chunks of a few lengths. The rows of a prefill chunk end with padding
where their prompts have ended, which leaves their states alone.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Int32

from rwkv_jax._operator import check
from rwkv_jax.generation._session import Model, Session

PREFILL_CHUNKS = (16, 64, 256)
"""The lengths of the prefill chunks in which prompts are read, in tokens."""


def read(
    model: Model,
    params: Any,
    session: Session,
    prompts: Sequence[np.ndarray],
    chunks: Sequence[int],
) -> Session:
    """The session after a prompt of each row, which may be empty. `session` is donated."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    begin = 0
    for chunk in lengths_of_prefill_chunks(int(lengths.max()), chunks):
        tokens = np.zeros((len(prompts), chunk), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            part = prompt[begin : begin + chunk]
            row[: len(part)] = part
        session = read_prefill_chunk(
            model, params, session, tokens, (lengths - begin).clip(0, chunk)
        )
        begin += chunk
    return session


def check_chunks(what: str, chunks: Any) -> tuple[int, ...]:
    """The lengths of prefill chunks. Raise an error that begins with `what` unless they are a
    sequence of positive integers."""
    if not isinstance(chunks, Sequence | np.ndarray) or not len(chunks):
        raise ValueError(
            f"{what}: prefill_chunks is {chunks!r}; accepted are lengths of at least 1"
        )
    for chunk in chunks:
        check.number(what, "a length of prefill_chunks", chunk, 1)
    return tuple(map(int, chunks))


def lengths_of_prefill_chunks(tokens: int, chunks: Sequence[int]) -> list[int]:
    """Which prefill chunks a prompt is read in: each time the longest that it more than half fills,
    or the shortest."""
    found = []
    while tokens > 0:
        fitting = [chunk for chunk in chunks if chunk < 2 * tokens]
        found.append(max(fitting, default=min(chunks)))
        tokens -= found[-1]
    return found


@functools.partial(jax.jit, static_argnames="model", donate_argnames="session")
def read_prefill_chunk(
    model: Model,
    params: Any,
    session: Session,
    tokens: Int32[Array | np.ndarray, "B T"],
    lengths: Int32[Array | np.ndarray, " B"],
) -> Session:
    """The session after the first `lengths` tokens of each row of `tokens`."""
    index = lax.broadcasted_iota(jnp.int32, tokens.shape, 1)
    hidden_states, state = model.module.hidden_states(
        *(params, jnp.asarray(tokens), session.state),
        segment_ids=(index < lengths[:, None]).astype(jnp.int32),
        dtype=model.dtype,
        kernels=model.of_prompts,
    )
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    hidden_states = jnp.take_along_axis(hidden_states, last, axis=1)[:, 0]
    reads = (lengths > 0)[:, None]
    return Session(
        state=state,
        logits=jnp.where(reads, model.logits(params, hidden_states), session.logits),
        seen=session.seen & ~reads,
        counts=jnp.where(reads, 0, session.counts),
        seeds=session.seeds,
        positions=session.positions + lengths,
    )
