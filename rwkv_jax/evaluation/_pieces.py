"""What `evaluate` and `score` have in common: a text goes through the model in pieces."""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from rwkv_jax._operator import check

T = TypeVar("T")


def checked(what: str, tokens: Any, vocabulary: int) -> np.ndarray:
    """The tokens of a text as an array.

    Raises:
      ValueError: they are not a vector of at least two tokens of the vocabulary. The message begins
        with `what`.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or len(tokens) < 2 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"{what}: tokens is {tokens.dtype} {list(tokens.shape)}; accepted are integers [T] "
            "with T of at least 2"
        )
    if not 0 <= tokens.min() <= tokens.max() < vocabulary:
        raise ValueError(
            f"{what}: tokens are from {tokens.min()} to {tokens.max()}; accepted are 0 to "
            f"{vocabulary - 1}"
        )
    return tokens


def check_sizes(what: str, **sizes: Any) -> None:
    """Raise an error that begins with `what` unless all sizes are positive integers."""
    for name, size in sizes.items():
        check.number(what, name, size, 1)


def one_behind(items: Iterable[T]) -> Iterator[T]:
    """The items, each after the next one was made: the host takes the results of a piece while a
    device computes the next piece."""
    waiting: list[T] = []
    for item in items:
        yield from waiting
        waiting = [item]
    yield from waiting
