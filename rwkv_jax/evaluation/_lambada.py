"""LAMBADA: the last word of each of some passages."""

import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from rwkv_jax.evaluation import _json_lines
from rwkv_jax.evaluation._continuations import beginning, continuations
from rwkv_jax.models._invariant import Invariant
from rwkv_jax.tokenizers import Tokenizer


class LastWords(NamedTuple):
    """How well the last words of passages are predicted.

    Attributes:
      passages: how many there are.
      accuracy: the part of them in which each token of the last word is the most probable one.
      perplexity: exp(-mean over passages of the log probability of the last word), which is
        infinite where a float cannot hold it.
    """

    passages: int
    accuracy: float
    perplexity: float


def read_lambada(path: str | os.PathLike[str]) -> list[tuple[str, str]]:
    """The passages of a file such as `lambada_test.jsonl` of RWKV-LM, which has `{"text": ...}` in
    each line: what comes before the last space, and the last word with that space.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not such an object; or its text has no space, begins with the only one,
        or ends with one; or the file has no passage. The message has the number of the line.
    """
    found = []
    for place, text in _json_lines.texts(path):
        before, space, word = text.rpartition(" ")
        if not before or not word:
            raise ValueError(
                f"{place}: the text is {_shortened(text)}; accepted is a text with a space before "
                "its last word"
            )
        found.append((before, space + word))
    if not found:
        raise ValueError(f"{path}: the file has no texts")
    return found


def lambada(
    module: ModuleType | Invariant,
    params: Any,
    tokenizer: Tokenizer,
    passages: Sequence[tuple[str, str]],
    **options: Any,
) -> LastWords:
    """How well a model predicts the last words of passages.

    As RWKV-LM's RWKV-v7/rwkv_v7_demo.py computes it: what comes before the last word is read after
    the token of the end of a text, and the last word, with the space before it, is encoded alone.

    Args:
      module: the module of the model, such as `rwkv_jax.models.rwkv7`.
      params: its parameters.
      tokenizer: as `tokenizers.load` gives it. One without such a token has nothing in its place.
      passages: what comes before the last word, and the last word, as `read_lambada` gives them.
      options: those of `score`.

    Raises:
      ValueError: there are no passages, or one of the two texts of one is empty.
      ValueError, TypeError, FloatingPointError: as `score` raises them.
    """
    if not passages or not all(all(passage) for passage in passages):
        raise ValueError("lambada: accepted are passages, with two texts that are not empty")
    start = beginning(tokenizer)
    pairs = [
        (start + tokenizer.encode(before), tokenizer.encode(word)) for before, word in passages
    ]
    found = continuations(module, params, pairs, **options)
    loss = -math.fsum(x.log_prob for x in found) / len(found)
    try:
        perplexity = math.exp(loss)
    except OverflowError:
        perplexity = math.inf
    return LastWords(len(found), sum(x.greedy for x in found) / len(found), perplexity)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}...")
