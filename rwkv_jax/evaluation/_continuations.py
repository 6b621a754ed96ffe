"""How probable texts are after others: what tasks are made of."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rwkv_jax.evaluation._scores import score
from rwkv_jax.tokenizers import Tokenizer


class Continuation(NamedTuple):
    """The logarithm of the probability of some tokens after others, and whether each of them was
    the most probable one."""

    log_prob: float
    greedy: bool


def beginning(tokenizer: Tokenizer) -> list[int]:
    """What every text begins with: the token of the end of a text, if there is one."""
    return [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]


def continuations(
    module: Any,
    params: Any,
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]],
    **options: Any,
) -> list[Continuation]:
    """The second one of each pair of tokens after the first one. Neither is empty. `options` are
    those of `score`."""
    pairs = list(pairs)
    documents = [np.concatenate([np.asarray(x, np.int32) for x in pair]) for pair in pairs]
    found = []
    for (_, last), of in zip(pairs, score(module, params, documents, **options), strict=True):
        part = slice(-len(last), None)
        log_prob = of.log_probs[part].sum(dtype=np.float64)
        found.append(Continuation(float(log_prob), bool(of.greedy[part].all())))
    return found
