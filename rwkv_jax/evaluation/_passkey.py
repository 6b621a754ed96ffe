"""A number that is to be found again in a long text."""

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from rwkv_jax._operator import check
from rwkv_jax.evaluation._continuations import beginning, continuations
from rwkv_jax.models._invariant import Invariant
from rwkv_jax.tokenizers import Tokenizer

_TASK = "One line of this text has a secret number. Keep it in mind for the end.\n"
_LINE = "The secret number is {0}. Keep in mind that it is {0}.\n"
_QUESTION = "Now, what was the secret number? The secret number is"
_ANSWER = " {0}"
_FILLER = (
    "The ferry leaves the harbour at noon and comes back in the evening.",
    "Bread is best on the day when it is baked.",
    "Several clouds drifted over the hills, but it did not rain.",
    "The old clock in the hall is always a little late.",
    "Two cyclists stopped at the bridge to look at the map.",
    "In spring the river carries melted snow from the mountains.",
    "She painted the door green and the window frames white.",
    "A cat sat on the wall and watched the birds in the garden.",
    "The library closes early on Saturdays.",
    "He forgot his umbrella on the train again.",
    "Honey keeps for years if the jar is closed well.",
    "The children built a castle of sand, and the tide took it away.",
    "From the tower one can see the whole valley.",
    "The baker greets all of his customers by name.",
    "An empty boat rocked gently beside the pier.",
    "They planted apple trees along the narrow road.",
)


class Found(NamedTuple):
    """How often a number was found in texts of a length, at a depth.

    Attributes:
      length: the number of tokens of the texts, at most.
      depth: where the number is, from 0 at the beginning to 1 at the end.
      texts: how many texts there were.
      accuracy: the part of them in which each token of the number is the most probable one after
        the question.
      log_prob: the mean of the logarithms of the probabilities of the numbers.
    """

    length: int
    depth: float
    texts: int
    accuracy: float
    log_prob: float


def passkey(
    module: ModuleType | Invariant,
    params: Any,
    tokenizer: Tokenizer,
    lengths: Sequence[int],
    *,
    depths: Sequence[float | int] = (0, 0.25, 0.5, 0.75, 1),
    samples: int = 4,
    seed: int = 0,
    **options: Any,
) -> list[Found]:
    """Whether a model finds a number again that one line of a long text has.

    A text has a line with a number of five digits between lines about nothing, in random order, and
    at the end the question what the number was. The model has found it if each token of the number
    is then the most probable one. Who guesses is right once in 90000 texts.

    Args:
      module: the module of the model, such as `rwkv_jax.models.rwkv7`.
      params: its parameters.
      tokenizer: as `tokenizers.load` gives it.
      lengths: how many tokens texts have, at most; they have as many lines as fit. The memory of
        the device does not depend on them.
      depths: after which parts of the other lines the number comes.
      samples: how many texts there are for each length and depth.
      seed: what the lines and numbers of the texts depend on.
      options: those of `score`.

    Returns:
      A `Found` for each length and depth.

    Raises:
      ValueError: a length is too small for the line and the question; or there are no lengths or
        depths; or a depth is not from 0 to 1; or `samples` or `seed` is not accepted.
      ValueError, TypeError, FloatingPointError: as `score` raises them.
    """
    check.number("passkey", "samples", samples, 1)
    check.number("passkey", "seed", seed, 0)
    if not len(lengths):
        raise ValueError(f"passkey: lengths is {lengths!r}; accepted are lengths in tokens")
    if not len(depths) or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"passkey: depths is {depths!r}; accepted are depths from 0 to 1")
    cells = list(itertools.product(lengths, map(float, depths)))
    writer = _Writer(tokenizer, seed)
    pairs = [writer.text(*cell) for cell in cells for _ in range(samples)]
    results = continuations(module, params, pairs, **options)
    found = []
    for i, (length, depth) in enumerate(cells):
        here = results[i * samples : (i + 1) * samples]
        accuracy = sum(x.greedy for x in here) / samples
        log_prob = sum(x.log_prob for x in here) / samples
        found.append(Found(length, depth, samples, accuracy, log_prob))
    return found


class _Writer:
    """Writes texts line by line, in tokens."""

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self._tokenizer, self._rng = tokenizer, np.random.default_rng(seed)
        self._filler = [tokenizer.encode(f"{line}\n") for line in _FILLER]

    def text(self, length: int, depth: float) -> tuple[list[int], list[int]]:
        """A text up to the answer, and the answer."""
        number = self._rng.integers(10_000, 100_000)
        begin = beginning(self._tokenizer) + self._tokenizer.encode(_TASK)
        line, question, answer = (
            self._tokenizer.encode(x.format(number)) for x in (_LINE, _QUESTION, _ANSWER)
        )
        needed = sum(map(len, (begin, line, question, answer)))
        check.number("passkey", "a length", length, needed)
        lines = list(self._lines(length - needed))
        at = round(depth * len(lines))
        parts = [begin, *lines[:at], line, *lines[at:], question]
        return list(itertools.chain.from_iterable(parts)), answer

    def _lines(self, room: int) -> Iterator[list[int]]:
        """Lines about nothing with so many tokens, at most."""
        while True:
            for index in self._rng.permutation(len(self._filler)):
                room -= len(self._filler[index])
                if room < 0:
                    return
                yield self._filler[index]
