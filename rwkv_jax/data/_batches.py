"""Batches of rows in which documents are packed."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from rwkv_jax._operator import check
from rwkv_jax.data._batch import Batches
from rwkv_jax.data._documents import Source


def training_batches(
    sources: Sequence[Source],
    *,
    context: int,
    batch: int,
    seed: int,
    weights: Sequence[int | float] | None = None,
    packed: bool = True,
) -> Batches:
    """Batches without end. Each source gives its documents in an order that depends on the seed
    and, in each pass through it, is another one. No order is stored.

    Documents go whole into the first row that has room for them, of the rows that are packed at
    once: 64, or as many as have 4 million tokens. These rows are shuffled too. A row has documents
    of one source. Parts of documents in which no prediction counts are left out.

    Args:
      sources: one or several.
      context: the number of places of a row.
      batch: the number of rows.
      seed: from 0 to 2^32 - 1.
      weights: the share of the rows that each source has, up to a factor; equal ones if None.
      packed: whether a row has several documents; otherwise it has one, or a part of one.

    Raises:
      ImportError: the package grain is not installed.
      TypeError: `sources` is no list of sources, or a number is no integer.
      ValueError: an argument has a wrong value, or a source has no document. Also from the
        iterator, where a source raises it.
    """
    _check("training_batches", sources, context, batch)
    shares = [1.0] * len(sources) if weights is None else [*map(float, weights)]
    if len(shares) != len(sources) or not all(0 < x < np.inf for x in shares):
        raise ValueError(
            f"training_batches: weights is {weights}; accepted are {len(sources)} positive "
            "numbers, one for each source"
        )
    check.number("training_batches", "seed", seed, 0, 2**32 - 1)
    # Integers of NumPy would not be JSON, which the state of an iterator is.
    options = {"context": int(context), "batch": int(batch), "packed": bool(packed)}
    options["seed"] = int(seed)
    iterator = _grain().shuffled(sources, shares, **options)
    return Batches(iterator, {**_documents(sources), "weights": shares, **options})


def validation_batches(
    sources: Sequence[Source], *, context: int, batch: int, packed: bool = True
) -> Batches:
    """Batches of all documents once, in their order, one source after another. The last batch has
    rows of padding if there are too few.

    Args:
      sources: one or several.
      context: the number of places of a row.
      batch: the number of rows.
      packed: as `training_batches` takes it.

    Raises:
      ImportError: the package grain is not installed.
      TypeError: `sources` is no list of sources, or a number is no integer.
      ValueError: an argument has a wrong value, or a source has no document. Also from the
        iterator, where a source raises it.
    """
    _check("validation_batches", sources, context, batch)
    options = {"context": int(context), "batch": int(batch), "packed": bool(packed)}
    return Batches(_grain().in_order(sources, **options), {**_documents(sources), **options})


def _documents(sources: Sequence[Source]) -> dict[str, list[int]]:
    return {"documents": [len(x) for x in sources]}


def _check(function: str, sources: Sequence[Source], context: int, batch: int) -> None:
    if not isinstance(sources, list | tuple):
        raise TypeError(
            f"{function}: sources is a {type(sources).__name__}; accepted is a list of sources"
        )
    for number, source in enumerate(sources):
        if isinstance(source, str) or not isinstance(source, Source):
            raise TypeError(
                f"{function}: sources[{number}] is a {type(source).__name__}; accepted is a "
                "source, such as Text(path, tokenizer)"
            )
    check.number(function, "context", context, 1)
    check.number(function, "batch", batch, 1)
    if not sources or not all(map(len, sources)):
        raise ValueError(
            f"{function}: the sources have {[*map(len, sources)]} documents; accepted is at least "
            "one source, and at least one document in each"
        )


def _grain() -> ModuleType:
    try:
        from rwkv_jax.data import _pipeline
    except ImportError as error:
        raise ImportError(
            "batches need the package grain: pip install 'rwkv-jax[train]'"
        ) from error
    return _pipeline
