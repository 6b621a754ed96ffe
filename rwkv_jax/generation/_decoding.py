"""Decoding: a token of each row is sampled and read, several times in a call."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Bool, Int32

from rwkv_jax._typing import Operand
from rwkv_jax.generation import _log_probs
from rwkv_jax.generation._log_probs import Steps
from rwkv_jax.generation._sampling import Settings, counted, sample
from rwkv_jax.generation._session import Model, Session
from rwkv_jax.models._deferral import at_step, flush

NO_TOKEN = -1
"""What a row has that is not active, or that samples a token that stops."""

MOST_STEPS = 32
"""The largest number of steps of a call."""

STEPS = 8
"""How many steps a call has that does not end early."""


class Controls(NamedTuple):
    """What a run of steps does not change: the settings of sampling, and the tokens that stop each
    row [B, vocabulary]."""

    settings: Settings
    stops: Bool[Operand, "B vocabulary"]


@functools.partial(
    jax.jit, static_argnames=("model", "defers", "all_steps", "logprobs"), donate_argnames="session"
)
def decode(
    model: Model,
    params: Any,
    session: Session,
    controls: Controls,
    left: Int32[Operand, " B"],
    steps: Int32[Array, ""] | np.int32,
    min_active_rows: Int32[Array, ""] | np.int32,
    defers: bool,
    all_steps: bool = False,
    logprobs: int | None = None,
) -> tuple[Session, Int32[Array, "steps B"], Int32[Array, ""], Steps | None]:
    """The session after up to `left` more tokens of each row, the tokens, how many steps they
    took, and the log probabilities of the tokens and of the `logprobs` likeliest ones, if it is
    not None. In place of a token a row may have `NO_TOKEN`, or `NO_DISTRIBUTION` as `sample` gives
    it, which also ends the row.

    A call ends after `steps` steps, which are at most `MOST_STEPS`, or when fewer than
    `min_active_rows` rows have tokens left. Both are data, so that there is one program, and a
    stream that asks for one token at a time gets the bits of a call that decodes many; but if it
    `defers` updates of states, logits may differ by rounding where the kernels do so.

    A call with `all_steps` always takes `STEPS` steps. On a GPU it is faster, because nobody has to
    wait for a step to know whether another one follows.
    """
    last = STEPS if all_steps else steps

    def is_enough(left: Array, count: Array) -> Array:
        return (count >= last) | (jnp.sum(left > 0) < jnp.maximum(min_active_rows, 1))

    def goes_on(carry: tuple[Session, Array, Array, Array, Any]) -> Array:
        _, left, _, count, _ = carry
        return ~is_enough(left, count)

    def body(
        carry: tuple[Session, Array, Array, Array, Any],
    ) -> tuple[Session, Array, Array, Array, Any]:
        session, left, tokens, count, found = carry
        sampled = _sampled(session, controls, left > 0)
        if logprobs is not None:
            here = _log_probs.step(session.logits, sampled, logprobs)
            found = jax.tree.map(lambda x, new: x.at[count].set(new), found, here)
        left = jnp.where(sampled >= 0, left - 1, 0)
        state = at_step(session.state, count, is_enough(left, count + 1))
        session = _read(model, params, session._replace(state=state), controls, sampled)
        return session, left, tokens.at[count].set(sampled), count + 1, found

    if defers:
        session = session._replace(state=model.deferred(params, session.state))
    tokens = jnp.full((MOST_STEPS, len(left)), NO_TOKEN, jnp.int32)
    found = None if logprobs is None else _log_probs.nothing(MOST_STEPS, len(left), logprobs)
    carry = session, jnp.asarray(left), tokens, jnp.int32(0), found
    if all_steps:
        carry = lax.fori_loop(0, STEPS, lambda _, carry: body(carry), carry)
    else:
        carry = lax.while_loop(goes_on, body, carry)
    session, _, tokens, count, found = carry
    return session._replace(state=flush(session.state)), tokens, count, found


def _sampled(session: Session, controls: Controls, active: Bool[Array, " B"]) -> Int32[Array, " B"]:
    """What each row has in the next step."""
    tokens = sample(
        *(session.logits, controls.settings, session.occurrences),
        *(session.seeds, session.positions),
    )
    stops = jnp.take_along_axis(controls.stops, tokens[:, None], axis=1)[:, 0] & (tokens >= 0)
    return jnp.where(active & ~stops, tokens, NO_TOKEN)


def _read(
    model: Model,
    params: Any,
    session: Session,
    controls: Controls,
    tokens: Int32[Array, " B"],
) -> Session:
    """The session after a token of each row that has one. All other rows keep theirs."""
    active = tokens >= 0
    reads = active.astype(jnp.int32)
    logits, state = model.module.apply(
        *(params, jnp.maximum(tokens, 0), session.state),
        segment_ids=reads,
        dtype=model.dtype,
        kernels=model.kernels,
    )
    seen, counts = counted(session.occurrences, controls.settings, tokens)
    rows = active[:, None]
    return Session(
        state=state,
        logits=jnp.where(rows, logits, session.logits),
        seen=jnp.where(rows, seen, session.seen),
        counts=jnp.where(rows, counts, session.counts),
        seeds=session.seeds,
        positions=session.positions + reads,
    )
