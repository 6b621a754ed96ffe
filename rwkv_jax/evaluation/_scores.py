"""The log probabilities of the tokens of documents.

The documents are packed into the rows of a batch, one after another, and the model reads a piece of
all rows at a time. So one program is compiled, whatever the lengths of the documents are, and the
memory depends on the size of a piece alone.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float32, Int32

from rwkv_jax.evaluation._pieces import check_sizes, checked, one_behind
from rwkv_jax.generation._session import Model, initial_state_of, repeated
from rwkv_jax.losses._derivative import Operands, predictions
from rwkv_jax.models import _not_finite
from rwkv_jax.models._invariant import Invariant, of_module
from rwkv_jax.models._kernels import Kernels, chosen
from rwkv_jax.models._stacking import select_rows

_SMALLEST = 16
"""Pieces have at least so many tokens, unless `chunk_size` is smaller."""


class Score(NamedTuple):
    """What a model says of each token of a document but the first one.

    Attributes:
      log_probs: [T - 1] in float32; at i the natural logarithm of the probability of the token
        i + 1, given all tokens before it.
      greedy: [T - 1]; at i whether that token was the most probable one, of several the first.
    """

    log_probs: Float32[np.ndarray, " T"]
    greedy: Bool[np.ndarray, " T"]


def score(
    module: ModuleType | Invariant,
    params: Any,
    documents: Sequence[Sequence[int] | np.ndarray],
    *,
    state: Any = None,
    batch: int = 8,
    chunk_size: int = 1024,
    dtype: DTypeLike = jnp.float32,
    kernels: Kernels | str | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[Score]:
    """The log probability of each token of some documents, given the tokens before it.

    The first token of a document is not predicted: with the token of the end of a text in front,
    all tokens of a text are.

    Documents are packed into `batch` rows, which the model reads in pieces, with the state from one
    piece to the next. So documents may be of any lengths: one program is compiled, the memory of
    the device does not depend on them, and the logits of all tokens are never there at once. The
    numbers of a document depend on the other documents by rounding alone.

    Args:
      module: the module of the model, such as `rwkv_jax.models.rwkv7`, or a `models.Invariant` of
        it.
      params: its parameters, in either form, on any devices.
      documents: integers [T] of each document, at least two.
      state: what every document starts from, a state of one row in the form of `params`, such as
        `models.load_state` gives; the state before any token if None. With a state each document
        begins a piece, whose rest is padding, because no row can take it within a piece.
      batch: how many rows go through the model at once, at most.
      chunk_size: how many tokens of a row go through the model at once, at most.
      dtype: the dtype of the activations.
      kernels: as `hidden_states` takes it.
      progress: called again and again with the number of tokens whose log probabilities have become
        known since the last call.

    Raises:
      ValueError: a document is not a vector of at least two tokens of the vocabulary; or a size is
        not positive; or the state is not one of this model.
      TypeError: a size is no integer, or `params` are not those of a model of `module`.
      FloatingPointError: a log probability is NaN or infinite.
    """
    params = of_module("score", module).checked(params)
    model = Model(module, jnp.dtype(dtype), chosen("score", kernels))
    check_sizes("score", batch=batch, chunk_size=chunk_size)
    vocabulary = len(params.head.weight)
    given = [checked(f"score: document {i}", x, vocabulary) for i, x in enumerate(documents)]
    start = initial_state_of("score", model, params, state)
    if not given:
        return []
    counts = [len(x) - 1 for x in given]
    batch = min(batch, len(given))
    longest = max(counts) if state is not None else -(-sum(counts) // batch)
    # A power of two, so that few programs are compiled for several calls.
    size = min(chunk_size, 1 << (max(longest, _SMALLEST) - 1).bit_length())
    found = [Score(np.empty(n, np.float32), np.empty(n, bool)) for n in counts]
    pieces = _pieces(given, batch, size, packs=state is None)
    for piece, results in one_behind(_results(model, params, start, pieces)):
        log_probs, greedy = jax.device_get(results)
        for run in piece.runs:
            place = slice(run.first, run.first + run.tokens)
            here = (run.row, slice(run.at, run.at + run.tokens))
            found[run.document].log_probs[place] = log_probs[here]
            found[run.document].greedy[place] = greedy[here]
            if (wrong := ~np.isfinite(log_probs[here])).any():
                raise FloatingPointError(
                    f"score: document {run.document}: a log probability is NaN or infinite after "
                    f"{run.first + wrong.argmax() + 1} tokens: {_not_finite.REASON}"
                )
        progress(sum(run.tokens for run in piece.runs))
    return found


class _Run(NamedTuple):
    """Predicted tokens of a document, from `first` on, and their place in a piece."""

    document: int
    first: int
    row: int
    at: int
    tokens: int


class _Piece(NamedTuple):
    """A piece of all rows [B, T]. A segment is a run, and 0 is padding. `continues` [B] says which
    rows go on with a document of the piece before."""

    runs: list[_Run]
    continues: np.ndarray
    inputs: np.ndarray
    targets: np.ndarray
    segment_ids: np.ndarray


def _pieces(
    documents: Sequence[np.ndarray], batch: int, size: int, *, packs: bool
) -> Iterator[_Piece]:
    """The pieces of the rows. A row whose document has ended takes the longest of those that are
    left: within a piece if it `packs`, and otherwise at the beginning of the next one."""
    order = iter(sorted(range(len(documents)), key=lambda i: -len(documents[i])))
    current: list[tuple[int, int] | None] = [None] * batch
    while True:
        continues = np.array([x is not None for x in current])
        piece = _Piece([], continues, *(np.zeros((batch, size), np.int32) for _ in range(3)))
        for row in range(batch):
            at = segment = 0
            while at < size:
                here = current[row]
                if here is None and (packs or at == 0):
                    here = next(((document, 0) for document in order), None)
                if here is None:
                    break
                document, first = here
                tokens = documents[document][first : first + size - at + 1]
                run = _Run(document, first, row, at, len(tokens) - 1)
                place, segment = (row, slice(at, at + run.tokens)), segment + 1
                piece.inputs[place], piece.targets[place] = tokens[:-1], tokens[1:]
                piece.segment_ids[place] = segment
                piece.runs.append(run)
                at, first = at + run.tokens, first + run.tokens
                current[row] = None if first == len(documents[document]) - 1 else (document, first)
        if not piece.runs:
            return
        yield piece


def _results(
    model: Model, params: Any, start: Any, pieces: Iterator[_Piece]
) -> Iterator[tuple[_Piece, tuple[Array, Array]]]:
    """Each piece, with the log probabilities of its targets and whether they are the likeliest."""
    fresh = state = None
    for piece in pieces:
        if fresh is None:
            fresh, state = (repeated(start, len(piece.continues)) for _ in range(2))
        arrays = map(jnp.asarray, piece[1:])
        state, results = _read(model, params, state, fresh, *arrays)
        yield piece, results


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def _read(
    model: Model,
    params: Any,
    state: Any,
    fresh: Any,
    continues: Bool[Array, " B"],
    inputs: Int32[Array, "B T"],
    targets: Int32[Array, "B T"],
    segment_ids: Int32[Array, "B T"],
) -> tuple[Any, tuple[Float32[Array, "B T"], Bool[Array, "B T"]]]:
    """The next state, and the results of a piece."""
    hidden_states, state = model.module.hidden_states(
        *(params, inputs, select_rows(continues, state, fresh)),
        segment_ids=segment_ids,
        dtype=model.dtype,
        kernels=model.kernels,
    )
    operands = Operands(hidden_states, params.head.wide(), targets, segment_ids != 0)
    losses, likeliest = predictions(operands)
    return state, (-losses, likeliest == targets)
