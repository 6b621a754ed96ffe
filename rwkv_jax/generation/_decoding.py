"""Decoding: a token of each row is sampled and read, several times in a call."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int32

from rwkv_jax._typing import Operand
from rwkv_jax.generation._sampling import Settings, counted, sample
from rwkv_jax.generation._session import Model, Session

NO_TOKEN = -1
MOST_STEPS = 32
"""The largest number of steps of a call."""


class Controls(NamedTuple):
    """What a run of steps does not change: the settings of sampling, and the tokens that stop each
    row [B, vocabulary]."""

    settings: Settings
    stops: Bool[Operand, "B vocabulary"]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="session")
def decode(
    model: Model,
    params: Any,
    session: Session,
    controls: Controls,
    left: Int32[Operand, " B"],
    steps: Int32[Array, ""] | np.int32,
    least: Int32[Array, ""] | np.int32,
) -> tuple[Session, Int32[Array, "steps B"], Int32[Array, ""]]:
    """The session after up to `left` more tokens of each row, the tokens, and how many steps they
    took. The tokens of a step are those of `_step`.

    A call ends after `steps` steps, which are at most `MOST_STEPS`, or when fewer than `least` rows
    have tokens left. Both are data, so that there is one program, and a stream that asks for one
    token at a time gets the bits of a call that decodes many.
    """

    def goes_on(carry: tuple[Session, Array, Array, Array]) -> Array:
        _, left, _, count = carry
        return (count < steps) & (jnp.sum(left > 0) >= jnp.maximum(least, 1))

    def body(carry: tuple[Session, Array, Array, Array]) -> tuple[Session, Array, Array, Array]:
        session, left, tokens, count = carry
        session, active, sampled = _step(model, params, session, controls, left > 0)
        return session, jnp.where(active, left - 1, 0), tokens.at[count].set(sampled), count + 1

    tokens = jnp.full((MOST_STEPS, len(left)), NO_TOKEN, jnp.int32)
    carry = session, jnp.asarray(left), tokens, jnp.int32(0)
    session, _, tokens, count = lax.while_loop(goes_on, body, carry)
    return session, tokens, count


def _step(
    model: Model, params: Any, session: Session, controls: Controls, active: Bool[Array, " B"]
) -> tuple[Session, Bool[Array, " B"], Int32[Array, " B"]]:
    """The session after one more token of each active row, which rows are still active, and the
    tokens. A row that samples a token that stops is no longer active. It does not read that token.
    Rows that are not active keep their session, and have `NO_TOKEN`."""
    tokens = sample(
        *(session.logits, controls.settings, session.occurrences),
        *(session.seeds, session.positions),
    )
    stopped = jnp.take_along_axis(controls.stops, tokens[:, None], axis=1)[:, 0]
    active = active & ~stopped
    reads = active.astype(jnp.int32)
    logits, state = model.module.apply(
        *(params, tokens, session.state),
        segment_ids=reads,
        dtype=model.dtype,
        implementation=model.implementation,
    )
    seen, counts = counted(session.occurrences, controls.settings, tokens)
    rows = active[:, None]
    session = Session(
        state=state,
        logits=jnp.where(rows, logits, session.logits),
        seen=jnp.where(rows, seen, session.seen),
        counts=jnp.where(rows, counts, session.counts),
        seeds=session.seeds,
        positions=session.positions + reads,
    )
    return session, active, jnp.where(active, tokens, NO_TOKEN)
