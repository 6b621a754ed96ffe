"""The losses of a model on a text, which is cut into windows."""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from rwkv_jax.evaluation._pieces import check_sizes, checked, one_behind
from rwkv_jax.generation._session import Model, initial_state_of, repeated
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import _not_finite
from rwkv_jax.models._invariant import Invariant, of_module
from rwkv_jax.models._kernels import Kernels, chosen

_LARGEST = math.log(sys.float_info.max)


class Bucket(NamedTuple):
    """The tokens with `first` to `last` tokens of context before them: how many there are, and
    their mean loss in nats."""

    first: int
    last: int
    tokens: int
    loss: float


class Evaluation(NamedTuple):
    """The losses of the tokens of a text, by the number of tokens of context before them.

    Attributes:
      losses: [context] in float64; at i the sum of the losses, in nats, of all tokens with i + 1
        tokens of context before them.
      counts: [context]; at i the number of these tokens.
    """

    losses: np.ndarray
    counts: np.ndarray

    @property
    def tokens(self) -> int:
        """The number of tokens that were predicted."""
        return int(self.counts.sum())

    @property
    def loss(self) -> float:
        """The mean loss of a token in nats."""
        return float(self.losses.sum()) / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss), which is infinite where a float cannot hold it."""
        return math.inf if self.loss > _LARGEST else math.exp(self.loss)

    def bits_per_byte(self, size: int) -> float:
        """The sum of all losses in bits, divided by the size of the text in bytes. It does not
        depend on the tokenizer, so that it compares models with different ones."""
        return float(self.losses.sum()) / math.log(2) / size

    def buckets(self) -> list[Bucket]:
        """The tokens with 1, 2, 3 to 4, 5 to 8, and so on, tokens of context before them."""
        found, last = [], 1
        for i in range(math.ceil(math.log2(len(self.counts))) + 1):
            first, last = (1 if i == 0 else last + 1), min(2**i, len(self.counts))
            part = slice(first - 1, last)
            if tokens := int(self.counts[part].sum()):
                found.append(Bucket(first, last, tokens, float(self.losses[part].sum()) / tokens))
        return found


def evaluate(
    module: ModuleType | Invariant,
    params: Any,
    tokens: Array | np.ndarray | Sequence[int],
    *,
    state: Any = None,
    context: int = 4096,
    batch: int = 8,
    chunk_size: int = 1024,
    dtype: DTypeLike = jnp.float32,
    kernels: Kernels | str | None = None,
    progress: Callable[[int], object] = lambda tokens: None,
) -> Evaluation:
    """The losses of a model on a text, each token given those before it.

    The tokens but the last one are cut into windows of `context` tokens. The model reads each
    window from `state`, and predicts the token after each token of it. So
    every token but the first is predicted once, from at least one and at most `context` tokens.
    With the token of the end of a text in front, all tokens of the text are predicted.

    A window goes through the model in parts, and the state from one part to the next, so that the
    memory does not depend on `context`. The logits of all tokens are never there at once. All parts
    run one compiled program.

    Args:
      module: the module with the functions of the model, such as `rwkv_jax.models.rwkv7`, or a
        `models.Invariant` of it.
      params: its parameters, in either form.
      tokens: integers [T], at least two.
      state: what every window starts from, a state of one row in the form of `params`, such as
        `models.load_state` gives; the state before any token if None.
      context: the length of a window.
      batch: how many windows go through the model at once, at most.
      chunk_size: how many tokens of a window go through the model at once, at most.
      dtype: the dtype of the activations.
      kernels: as `hidden_states` takes it.
      progress: called again and again with the number of tokens whose losses have become known
        since the last call.

    Raises:
      ValueError: `tokens` is not a vector of at least two tokens of the vocabulary; or a size is
        not positive; or the state is not one of this model.
      TypeError: a size is no integer, or `params` are not those of a model of `module`.
      FloatingPointError: a loss is NaN or infinite.
    """
    params = of_module("evaluate", module).checked(params)
    model = Model(module, jnp.dtype(dtype), chosen("evaluate", kernels))
    check_sizes("evaluate", context=context, batch=batch, chunk_size=chunk_size)
    tokens = checked("evaluate", tokens, len(params.head.weight))
    start = initial_state_of("evaluate", model, params, state)
    context = min(context, len(tokens) - 1)
    batch = min(batch, math.ceil((len(tokens) - 1) / context))
    losses, counts = np.zeros(context), np.zeros(context, np.int64)

    def take(part: slice, found: Array, mask: np.ndarray) -> None:
        losses[part] += np.asarray(found).sum(0, dtype=np.float64)[: context - part.start]
        counts[part] += mask.sum(0)[: context - part.start]
        if (wrong := ~np.isfinite(losses[part])).any():
            raise FloatingPointError(
                f"evaluate: a loss is NaN or infinite after {part.start + wrong.argmax() + 1} "
                f"tokens of context: {_not_finite.REASON}"
            )
        progress(int(mask.sum()))

    for part in one_behind(_parts(model, params, start, tokens, context, batch, chunk_size)):
        take(*part)
    return Evaluation(losses, counts)


def _parts(
    model: Model,
    params: Any,
    start: Any,
    tokens: np.ndarray,
    context: int,
    batch: int,
    chunk_size: int,
) -> Iterator[tuple[slice, Array, np.ndarray]]:
    """The positions within the windows, the losses [B, positions] and the mask of each part."""
    parts = math.ceil(context / chunk_size)
    size = math.ceil(context / parts)

    def windows(x: np.ndarray, first: int) -> np.ndarray:
        """Those of a batch, with zeros after the last token and after each window."""
        rows = np.zeros((batch, parts * size), x.dtype)
        for row, begin in zip(rows, range(first, len(x), context), strict=False):
            row[:context][: len(x) - begin] = x[begin : begin + context]
        return rows

    inputs, targets = tokens[:-1].astype(np.int32), tokens[1:].astype(np.int32)
    for first in range(0, len(inputs), batch * context):
        rows = windows(inputs, first), windows(targets, first)
        masks = windows(np.ones(len(inputs), bool), first)
        state = repeated(start, batch)
        for begin in range(0, context, size):
            part = slice(begin, begin + size)
            mask = masks[:, part]
            if not mask.any():
                break
            of_part = (*(jnp.asarray(x[:, part]) for x in rows), jnp.asarray(mask))
            found, state = _losses(model, params, state, *of_part)
            yield part, found, mask


@functools.partial(jax.jit, static_argnames="model", donate_argnames="state")
def _losses(
    model: Model, params: Any, state: Any, inputs: Array, targets: Array, mask: Array
) -> tuple[Array, Any]:
    """The losses of a part [B, T], 0 where the mask is, and the next state."""
    hidden_states, state = model.module.hidden_states(
        params, inputs, state, dtype=model.dtype, kernels=model.kernels
    )
    losses = cross_entropy(hidden_states, params.head.wide(), targets, mask=mask, reduction="none")
    return losses, state
