"""What a later call needs to continue: the state of a model between two tokens."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export
from jaxtyping import Bool, Float, Float32, Int32

from rwkv_jax.generation._sampling import Occurrences
from rwkv_jax.models import _linear, _mesh
from rwkv_jax.models._checkpoints.tensors import described, quoted
from rwkv_jax.models._invariant import Invariant
from rwkv_jax.models._parameters import names
from rwkv_jax.models._postponement import postponed

MOST_TOKENS = 2**31 - 1
"""The largest position that a session can have."""


class Model(NamedTuple):
    """What programs are compiled for: a module of `rwkv_jax.models` or an `Invariant` one, the
    dtype of the activations, and the implementation of the operator."""

    module: ModuleType | Invariant
    dtype: np.dtype
    implementation: str | None

    def logits(self, params: Any, features: Float[Array, "B C"]) -> Float32[Array, "B vocabulary"]:
        """What the head makes of features."""
        if isinstance(self.module, Invariant):
            return self.module.logits(params, features)
        return _linear.logits(params.head, features)

    def postponed(self, params: Any, state: Any) -> Any:
        """The state for a loop over tokens."""
        return state if self.implementation else postponed(self.module, params, state)


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


def own(model: Model, params: Any, batch: int, session: Session | None) -> Session:
    """A session that the caller may donate: a new one, or a copy of `session`.

    Raises:
      ValueError: `session` is not one of this model and this number of rows. The message lists all
        arrays that differ.
    """
    if session is None:
        return started(model, params, batch)
    expected = jax.eval_shape(functools.partial(started, model, batch=batch), params)
    if wrong := list(differences(names(expected), names(session))):
        raise ValueError(
            f"generate: session is not one of this model with {batch} rows and {model.dtype} "
            "activations:\n  " + "\n  ".join(wrong)
        )
    return copied(session)


def differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with each array of a session or of a state, by its name."""
    for name, x in expected.items():
        wanted = f"{described(x.shape)} in {x.dtype}"
        if name not in found:
            yield f"{name} is missing; expected is {wanted}"
        elif (found[name].shape, found[name].dtype) != (x.shape, x.dtype):
            given = f"{described(found[name].shape)} in {found[name].dtype}"
            yield f"{name} is {given}; expected is {wanted}"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{quoted(name)} is no array of a session of this model"


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
        raise ValueError(f"{what}: seed is {seed!r}; accepted are integers from 0 to 2^31 - 1")
    return np.asarray(rows, np.int32)
