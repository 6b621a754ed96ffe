"""The step of decoding: a token of each row is sampled and read."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import KeyPath
from jaxtyping import Bool, Int32

from rwkv_jax.generation._sampling import Settings, counted, sample
from rwkv_jax.generation._session import Model, Session
from rwkv_jax.models._stacking import is_stacked

NO_TOKEN = -1


class Controls(NamedTuple):
    """What a run of steps does not change: the settings of sampling, and the tokens that stop a
    row [vocabulary]."""

    settings: Settings
    stops: Bool[Array, " vocabulary"]


@functools.partial(jax.jit, static_argnames="model", donate_argnames="session")
def step(
    model: Model, params: Any, session: Session, controls: Controls, active: Bool[Array, " B"]
) -> tuple[Session, Bool[Array, " B"], Int32[Array, " B"]]:
    """The session after one more token of each active row, which rows are still active, and the
    tokens. A row that samples a token that stops is no longer active. It does not read that token.
    Rows that are not active keep their session, and have `NO_TOKEN`."""
    tokens = sample(
        *(session.logits, controls.settings, session.occurrences),
        *(session.seeds, session.positions),
    )
    active = active & ~controls.stops[tokens]
    logits, state = model.module.apply(
        *(params, tokens, session.state), dtype=model.dtype, implementation=model.implementation
    )
    occurrences = counted(session.occurrences, controls.settings, tokens)
    after = Session(
        state, logits, *occurrences, seeds=session.seeds, positions=session.positions + 1
    )

    def selected(path: KeyPath, new: Array, old: Array) -> Array:
        before = (1,) if is_stacked(path) else ()
        rows = active.reshape(*before, -1, *(1,) * (new.ndim - len(before) - 1))
        return jnp.where(rows, new, old)

    session = jax.tree_util.tree_map_with_path(selected, after, session)
    return session, active, jnp.where(active, tokens, NO_TOKEN)
