"""Batches by the package grain, which not everyone has who imports the sources.

Grain computes the order of documents, mixes sources, packs rows, works ahead, and knows where an
iterator is. What is here cuts documents into columns of tokens, targets and what counts.
"""

import functools
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental

from rwkv_jax.data._batch import Batch
from rwkv_jax.data._documents import Document, SizedSource, Source

_COLUMNS = "columns"
_ROWS_AT_ONCE = 64
_TOKENS_AT_ONCE = 2**22
_READ = grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
_BATCHES_AHEAD = 2


class Parts:
    """A source that knows its sizes, in parts of at most `context` + 1 tokens. The last token of
    one is the first one of the next, so that all tokens but the first are predicted."""

    def __init__(self, source: SizedSource, context: int):
        self._source, self._context = source, context
        self._counts = (source.sizes - 2) // context + 1
        self._ends = np.cumsum(self._counts)
        if not self._ends[-1]:
            raise ValueError("data: a source has no document of two tokens or more")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int, /) -> Document:
        document = int(np.searchsorted(self._ends, number, side="right"))
        part = number - int(self._ends[document] - self._counts[document])
        start = part * self._context
        return self._source.part(document, start, start + self._context + 1)


class Cut(experimental.FlatMapTransform):
    """Parts of documents as arrays [n, 3] of tokens, targets, and whether they count, n being at
    most `context`. What follows the last prediction that counts is left out."""

    def __init__(self, context: int):
        self._context = context

    def flat_map(self, element: Document) -> list[dict[str, np.ndarray]]:
        tokens, counts = element
        columns = np.stack([tokens[:-1], tokens[1:], counts[1:]], axis=1, dtype=np.int32)
        parts = []
        for start in range(0, len(columns), self._context):
            part = columns[start : start + self._context]
            counted = np.flatnonzero(part[:, 2])
            if counted.size:
                parts.append({_COLUMNS: part[: counted[-1] + 1]})
        return parts


def shuffled(
    sources: Sequence[Source],
    weights: Sequence[float],
    *,
    context: int,
    batch: int,
    packed: bool,
    seed: int,
) -> Any:
    """The iterator of `training_batches`."""
    rows = [
        _rows(_documents(x, context).shuffle(seed=seed).repeat(), context, packed, seed)
        for x in sources
    ]
    return _batches(grain.IterDataset.mix(rows, weights) if len(rows) > 1 else rows[0], batch)


def in_order(sources: Sequence[Source], *, context: int, batch: int, packed: bool) -> Any:
    """The iterator of `validation_batches`."""
    documents = grain.MapDataset.concatenate([_documents(x, context) for x in sources])
    return _batches(_rows(documents, context, packed, None), batch)


def _documents(source: Source, context: int) -> grain.MapDataset:
    whole = not isinstance(source, SizedSource)
    given: Any = source if whole else Parts(source, context)
    documents = grain.MapDataset.source(given)
    return documents.map(_checked) if whole else documents


def _checked(document: Document) -> Document:
    # A source with no other documents would never fill a row.
    if not np.any(document.counts[1:]):
        raise ValueError("data: a document has no token after the first one that counts")
    return document


def _rows(
    documents: grain.MapDataset, context: int, packed: bool, seed: int | None
) -> grain.IterDataset:
    parts = experimental.FlatMapIterDataset(documents.to_iter_dataset(_READ), Cut(context))
    return experimental.FirstFitPackIterDataset(
        parts,
        length_struct={_COLUMNS: context},
        num_packing_bins=min(_ROWS_AT_ONCE, max(1, _TOKENS_AT_ONCE // context)),
        shuffle_bins=seed is not None,
        seed=seed or 0,
        max_sequences_per_bin=None if packed else 1,
    )


def _batches(rows: grain.IterDataset, batch: int) -> Any:
    pad = functools.partial(experimental.batch_and_pad, batch_size=batch)
    made = rows.batch(batch, batch_fn=pad).map(_batch)
    ahead = experimental.ThreadPrefetchIterDataset(made, prefetch_buffer_size=_BATCHES_AHEAD)
    return iter(ahead)


def _batch(packed: dict[str, np.ndarray]) -> Batch:
    tokens, targets, counts = np.moveaxis(packed[_COLUMNS], -1, 0).copy()
    return Batch(tokens, targets, counts > 0, packed[f"{_COLUMNS}_segment_ids"])
