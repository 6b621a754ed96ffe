"""What a later call needs to continue: the state of a model between two tokens."""

import dataclasses
import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jaxtyping import Bool, Float, Float32, Int32

from rwkv_jax.generation._sampling import Occurrences
from rwkv_jax.models import _linear, _mesh
from rwkv_jax.models._arguments import check_state, differences
from rwkv_jax.models._deferral import deferred
from rwkv_jax.models._invariant import Invariant
from rwkv_jax.models._kernels import Kernels
from rwkv_jax.models._parameters import names
from rwkv_jax.models._stacking import block_axes

MOST_TOKENS = 2**31 - 1
"""The largest position that a session can have."""


class Model(NamedTuple):
    """What programs are compiled for: a module of `rwkv_jax.models` or an `Invariant` one, the
    dtype of the activations, and the kernels."""

    module: ModuleType | Invariant
    dtype: np.dtype
    kernels: Kernels = Kernels()

    def logits(
        self, params: Any, hidden_states: Float[Array, "B C"]
    ) -> Float32[Array, "B vocabulary"]:
        """What the head makes of hidden states."""
        if isinstance(self.module, Invariant):
            return self.module.logits(params, hidden_states)
        return _linear.logits(params.head, hidden_states)

    @property
    def of_prompts(self) -> Kernels:
        """The kernels for prompts, of which only `Invariant` reads one token at a time."""
        if self.kernels.blocks != "fused" or isinstance(self.module, Invariant):
            return self.kernels
        return dataclasses.replace(self.kernels, blocks=None)

    def deferred(self, params: Any, state: Any) -> Any:
        """The state for a loop over tokens."""
        return deferred(self.module, params, state) if self.kernels.may_fuse else state


class Session(NamedTuple):
    """What is known of the rows of a batch between two tokens; all that a call needs to continue.

    The functions of this package never change a session, nor delete its arrays.

    Attributes:
      state: the state of the model, in the form of its parameters.
      logits: of the next token [B, vocabulary], in float32.
      seen: which tokens have occurred since the last prompt [B, vocabulary].
      counts: how often, as `Sampling` counts them [B, vocabulary], in float32.
      seeds: the seed of each row [B], in int32.
      positions: how many tokens each row has had, prompts included [B], in int32.
    """

    state: Any
    logits: Float32[Array, "B vocabulary"]
    seen: Bool[Array, "B vocabulary"]
    counts: Float32[Array, "B vocabulary"]
    seeds: Int32[Array, " B"]
    positions: Int32[Array, " B"]

    @property
    def occurrences(self) -> Occurrences:
        return Occurrences(self.seen, self.counts)


export.register_namedtuple_serialization(Session, serialized_name="rwkv_jax.generation.Session")


@functools.partial(jax.jit, static_argnames=("model", "batch"), keep_unused=True)
def started(model: Model, params: Any, batch: int) -> Session:
    """A session before the first token, with the seeds 0."""
    shape = (batch, len(params.head.weight))
    session = Session(
        state=model.module.initial_state(params, batch, model.dtype),
        logits=jnp.zeros(shape, jnp.float32),
        seen=jnp.zeros(shape, bool),
        counts=jnp.zeros(shape, jnp.float32),
        seeds=jnp.zeros(batch, jnp.int32),
        positions=jnp.zeros(batch, jnp.int32),
    )
    return _mesh.beside(session, params.ln_out.weight)


def own(model: Model, params: Any, batch: int, session: Session | None, state: Any) -> Session:
    """A session that the caller may donate: one that starts from `state`, or a copy of `session`.

    Raises:
      TypeError, ValueError: `session` or `state` is not one of this model and this number of rows.
        The message lists all arrays that differ.
    """
    if session is None:
        new = started(model, params, batch)
        if state is None:
            return new
        initial_state_of("generate", model, params, state)
        return new._replace(state=repeated(state, batch))
    expected = jax.eval_shape(functools.partial(started, model, batch=batch), params)
    if wrong := list(differences(names(expected), names(session))):
        raise ValueError(
            f"generate: session is not one of this model with {batch} rows and {model.dtype} "
            "activations:\n  " + "\n  ".join(wrong)
        )
    return copied(session)


def initial_state_of(what: str, model: Model, params: Any, state: Any) -> Any:
    """The state of one row that sequences start from: `state`, or that before any token if None.

    Raises:
      TypeError, ValueError: `state` is not one of this model.
    """
    if state is None:
        return model.module.initial_state(params, 1, model.dtype)
    check_state(what, model.module.initial_state, params, state, 1, model.dtype)
    return state


@functools.partial(jax.jit, static_argnames="batch")
def repeated(state: Any, batch: int) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.repeat(x, batch, axis=block_axes(path)), state
    )


@jax.jit
def copied(session: Session) -> Session:
    """The same session in other buffers, which may be donated."""
    return jax.tree.map(jnp.copy, session)


def seeds_of_rows(what: str, seed: int | Sequence[int], batch: int) -> np.ndarray:
    """The seed of each row: those given, or `seed` of the first row, and of each other row the next
    number. Errors begin with `what`.

    Raises:
      ValueError: there are seeds for another number of rows, or one outside 0 to 2^31 - 1.
      TypeError: a seed is no integer.
    """
    array = np.asarray(seed)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{what}: seed is {seed!r}; accepted are integers")
    if array.ndim and array.shape != (batch,):
        raise ValueError(
            f"{what}: seed has the shape {array.shape}; accepted is one integer, or {batch}, one "
            "for each row"
        )
    rows = array if array.ndim else [int(array) + row for row in range(batch)]
    if not all(0 <= int(x) < 2**31 for x in rows):
        # The seeds of the other rows come after a single one.
        most = f"2^31 - {1 if array.ndim else batch}"
        raise ValueError(f"{what}: seed is {seed!r}; accepted are integers from 0 to {most}")
    return np.asarray(rows, np.int32)
