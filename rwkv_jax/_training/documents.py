"""Documents of files, packed into rows."""

import argparse
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rwkv_jax import _files, data, tokenizers
from rwkv_jax._training.conversations import form
from rwkv_jax._training.data import Batch, checksum_of, files
from rwkv_jax.data import Document, Source
from rwkv_jax.tokenizers import Tokenizer


class Encoded:
    """A source of documents in memory, which is shuffled in parts even if it is one text.

    Attributes:
      sizes: the number of tokens of each document.
      counts: whether any prediction counts.
    """

    def __init__(self, documents: Sequence[Document]):
        self._documents = [x for x in documents if len(x.tokens)]
        self.sizes = np.array([len(x.tokens) for x in self._documents], np.int64)
        self.counts = any(x.counts[1:].any() for x in self._documents)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, number: int, /) -> Document:
        return self._documents[number]

    def part(self, number: int, start: int, stop: int) -> Document:
        return Document(*(x[start:stop] for x in self._documents[number]))


class Documents:
    """What train.py trains on with --data: documents of files, which are packed into rows.

    Attributes:
      held_out: rows of documents that are held out, or of those of --validation.
      efficiency: which share of the places of all rows so far has a prediction that counts, or None
        before the first row.
    """

    ngrams: Mapping[str, float] = {}

    def __init__(self, args: argparse.Namespace, vocabulary: int, *, packed: bool):
        given = [_weighted(text) for text in args.data]
        self.tokenizer = _tokenizer(args, vocabulary)
        open_ = _Opener(args, vocabulary, self.tokenizer)
        sources = [open_(path) for path, _ in given]
        weights = [weight for _, weight in given]
        share, validation = _validation(args.validation)
        if validation is None:
            pairs = [_split(x, share) for x in sources]
            sources, held_out = (list(x) for x in zip(*pairs, strict=True))
        else:
            sources, held_out = [_in_parts(x) for x in sources], [open_(validation)]
        self._documents = sum(map(len, sources))
        sized = [x for x in sources if isinstance(x, data.SizedSource)]
        self.tokens = sum(int(x.sizes.sum()) for x in sized) if len(sized) == len(sources) else None
        self._options = {"context": args.context, "packed": packed}
        self.held_out = self._rows(held_out, max(1, args.eval_tokens // args.context))
        options = {"batch": args.batch, "seed": args.seed, "weights": weights}
        self._batches = data.training_batches(sources, **options, **self._options)
        self._positions: dict[int, Any] = {}
        self._places = self._counted = 0
        self.checksum = zlib.crc32(repr(weights).encode(), checksum_of(open_.files))

    def __str__(self) -> str:
        held_out = np.count_nonzero(np.asarray(self.held_out.mask))
        return f"{self._documents:,} documents to train on, {held_out:,} held-out tokens to predict"

    @property
    def efficiency(self) -> float | None:
        return self._counted / self._places if self._places else None

    def batch(self, step: int) -> Batch:
        made = next(self._batches)
        self._places += made.mask.size
        self._counted += int(made.mask.sum())
        self._positions[step + 1] = self._batches.get_state()
        self._positions.pop(step - 7, None)
        return Batch(made.tokens, made.targets, made.mask, made.segment_ids)

    def position(self, step: int) -> Any:
        return self._positions[step]

    def resume(self, step: int, position: Any) -> None:
        self._batches.set_state(position)
        self._positions[step] = position

    def close(self) -> None:
        """End the threads that make batches."""
        self._batches.close()

    def _rows(self, sources: Sequence[Source], rows: int) -> Batch:
        """The first rows of the documents of all sources, about so many."""
        each = -(-rows // len(sources))
        found = []
        for source in sources:
            batches = data.validation_batches([source], batch=each, **self._options)
            first = next(batches)
            batches.close()
            used = first.mask.any(axis=1)
            found.append([x[used] for x in first])
        return Batch(*(np.concatenate(x) for x in zip(*found, strict=True)))


class _Opener:
    """Makes sources of paths. `files` are those that it has opened."""

    def __init__(self, args: argparse.Namespace, vocabulary: int, tokenizer: Tokenizer | None):
        self._args, self._vocabulary, self._tokenizer = args, vocabulary, tokenizer
        self.files: list[Path] = []

    def __call__(self, path: Path) -> Source:
        index = path.with_name(path.name + ".idx")
        if path.suffix in (".bin", ".idx") or (not path.exists() and index.exists()):
            self.files.append(path if path.exists() else index)
            return data.BinIdx(path, vocab_size=self._vocabulary)
        # Where it is not known, to ask again raises the error that says what is accepted.
        tokenizer = self._tokenizer or tokenizers.load(
            tokenizers.for_vocabulary(self._vocabulary, checkpoint=self._args.model)
        )
        paths = files(path, self._args.pattern) if path.is_dir() else [path]
        if not paths:
            raise ValueError(f"--data: {path} has no files {self._args.pattern}")
        self.files += paths
        if path.suffix in (".jsonl", ".json", ".ndjson"):
            return data.JsonLines(paths, tokenizer, form=form(self._args))
        return data.Text(paths, tokenizer, separator=self._args.separator)


def _weighted(text: str) -> tuple[Path, float]:
    """The path and the weight in FILE or FILE=WEIGHT."""
    path, equals, weight = text.rpartition("=")
    if not equals or os.path.exists(text):
        return _files.expanded(text), 1.0
    try:
        return _files.expanded(path), float(weight)
    except ValueError:
        raise ValueError(
            f"--data is {text}, whose weight is {weight!r}; accepted are FILE and FILE=WEIGHT"
        ) from None


def _validation(given: str) -> tuple[float, Path | None]:
    """The share of the documents that is held out, or a file of others."""
    try:
        share = float(given)
    except ValueError:
        return 0.0, _files.expanded(given)
    if not 0 < share <= 0.5:
        raise ValueError(
            f"--validation is {given}; accepted are a share above 0 and up to 0.5, and a file"
        )
    return share, None


def _tokenizer(args: argparse.Namespace, vocabulary: int) -> Tokenizer | None:
    """The tokenizer of the model, or None if it is not known, as for files of tokens."""
    name = args.tokenizer
    if name is None and args.model is None:
        name = "bytes"
    if name is None:
        try:
            name = tokenizers.for_vocabulary(vocabulary, checkpoint=args.model)
        except ValueError:
            return None
    return tokenizers.load(name, vocabulary)


def _split(source: Source, share: float) -> tuple[Source, Source]:
    """What of a source is trained on and what is held out. Of few documents, which may be a single
    text, the last tokens are held out."""
    every = round(1 / share)
    if len(source) >= every:
        return data.split(source, every)
    documents = [source[i] for i in range(len(source))]
    counts = np.concatenate([x.counts for x in documents])
    total = int(counts.sum())
    kept = max(1, min(round(total * (1 - share)), total - 2))
    cut = int(np.searchsorted(np.cumsum(counts), kept)) + 1
    parts = Encoded([*_pieces(documents, 0, cut)]), Encoded([*_pieces(documents, cut, len(counts))])
    if not all(part.counts for part in parts):
        raise ValueError(
            "--data: there are too few tokens to hold some out; give --validation FILE"
        )
    return parts


def _in_parts(source: Source) -> Source:
    """The same source, in memory if it has few documents, so that these are shuffled in parts."""
    few = len(source) < 20 and not isinstance(source, data.SizedSource)
    return Encoded([source[i] for i in range(len(source))]) if few else source


def _pieces(documents: Sequence[Document], start: int, stop: int) -> Iterator[Document]:
    """What of documents is between two places of all their tokens."""
    before = 0
    for document in documents:
        size = len(document.tokens)
        part = slice(min(max(start - before, 0), size), min(max(stop - before, 0), size))
        yield Document(document.tokens[part], document.counts[part])
        before += size
