"""Sources of documents, as --data names them."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from rwkv_jax import data, tokenizers
from rwkv_jax._training.conversations import form
from rwkv_jax._training.data import files
from rwkv_jax.data import Document, FileSource, SizedSource, Source
from rwkv_jax.tokenizers import Tokenizer

LINES = (".jsonl", ".json", ".ndjson")
TOKENS = (".bin", ".idx")
_SMALL = 2**22
"""Bytes of files that may be in memory, as tokens. Longer texts are cut into parts."""


class SizedFileSource(SizedSource, FileSource, Protocol):
    """Documents of files whose lengths are known."""


class Encoded:
    """All documents of a source in memory, so that they are shuffled in parts even if they are one
    text.

    Attributes:
      sizes: the number of tokens of each document.
    """

    def __init__(self, source: FileSource):
        self._documents = [source[i] for i in range(len(source))]
        self.sizes = np.array([len(x.tokens) for x in self._documents], np.int64)
        self.place, self.checksums = source.place, source.checksums

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, number: int, /) -> Document:
        return self._documents[number]

    def part(self, number: int, start: int, stop: int) -> Document:
        return Document(*(x[start:stop] for x in self._documents[number]))


class _Section:
    """The tokens of a source from `start` on and before `stop`, which count through all of its
    documents."""

    def __init__(self, source: SizedFileSource, start: int, stop: int):
        self._source = source
        ends = np.cumsum(source.sizes)
        begins = ends - source.sizes
        self._numbers = np.flatnonzero((ends > start) & (begins < stop))
        begins, ends = begins[self._numbers], ends[self._numbers]
        self._offsets = np.maximum(start - begins, 0)
        self.sizes = np.minimum(ends, stop) - begins - self._offsets

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int, /) -> Document:
        number = range(len(self))[number]
        return self.part(number, 0, int(self.sizes[number]))

    def part(self, number: int, start: int, stop: int) -> Document:
        offset, stop = int(self._offsets[number]), min(stop, int(self.sizes[number]))
        return self._source.part(int(self._numbers[number]), offset + start, offset + stop)

    def place(self, number: int) -> str:
        return self._source.place(int(self._numbers[number]))


class _Joined:
    """The documents of several sources, one source after another."""

    def __init__(self, sources: Sequence[FileSource]):
        self._sources, self._ends = sources, np.cumsum([*map(len, sources)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int, /) -> Document:
        source, number = self._at(number)
        return source[number]

    def place(self, number: int) -> str:
        source, number = self._at(number)
        return source.place(number)

    def checksums(self) -> list[int]:
        return [x for source in self._sources for x in source.checksums()]

    def _at(self, number: int) -> tuple[FileSource, int]:
        number = range(len(self))[number]
        index = int(np.searchsorted(self._ends, number, side="right"))
        return self._sources[index], number - int(self._ends[index]) + len(self._sources[index])


class _Numbers:
    """Documents as long as those of a source, whose tokens are their numbers from `first` on."""

    def __init__(self, source: Source, first: int):
        self._source, self._first = source, first

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, number: int, /) -> Document:
        return self._numbered(self._source[number], number)

    def _numbered(self, document: Document, number: int) -> Document:
        return document._replace(tokens=np.full_like(document.tokens, self._first + number))


class _SizedNumbers(_Numbers):
    """The same of a source that knows the lengths of its documents."""

    def __init__(self, source: SizedSource, first: int):
        super().__init__(source, first)
        self._sized, self.sizes = source, source.sizes

    def part(self, number: int, start: int, stop: int) -> Document:
        return self._numbered(self._sized.part(number, start, stop), number)


def numbers(source: Source, first: int) -> Source:
    """A source that is packed into the same rows, and whose tokens tell their document: they are
    its number, from `first` on."""
    if isinstance(source, SizedSource):
        return _SizedNumbers(source, first)
    return _Numbers(source, first)


class Opener:
    """Makes sources of paths. One with fewer documents than `few` is in memory if its files are
    small, and read in place if they are large."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, tokenizer: Tokenizer | None, few: int
    ):
        self._args, self._vocabulary, self._tokenizer = args, vocabulary, tokenizer
        self._few, self._part = few, 8 * args.context

    def __call__(self, path: Path) -> FileSource:
        is_index = not path.exists() and path.with_name(path.name + ".idx").exists()
        if path.suffix in TOKENS or is_index:
            return data.BinIdx(path, vocab_size=self._vocabulary)
        paths = files(path, self._args.pattern) if path.is_dir() else [path]
        if not paths:
            raise ValueError(f"--data: {path} has no files {self._args.pattern}")
        if tokens := [x for x in paths if x.suffix in TOKENS]:
            raise ValueError(
                f"--data: {path} has {tokens[0].name}; accepted in a folder are texts and lines of "
                "JSON, and --data FILE for each file of tokens"
            )
        size = sum(x.stat().st_size for x in paths)
        is_small = size <= max(_SMALL, 20 * self._part)
        found = self._texts(paths, None if is_small else max(self._part, size >> 20, 2**10))
        in_memory = len(found) == 1 or (is_small and len(found) < self._few)
        return Encoded(found) if in_memory else found

    def _texts(self, paths: Sequence[Path], part: int | None) -> FileSource:
        # Where it is not known, to ask again raises the error that says what is accepted.
        tokenizer = self._tokenizer or tokenizers.load(
            tokenizers.for_vocabulary(self._vocabulary, checkpoint=self._args.model)
        )
        lines = [x for x in paths if x.suffix in LINES]
        texts = [x for x in paths if x.suffix not in LINES]
        found: list[FileSource] = []
        if lines:
            found.append(data.JsonLines(lines, tokenizer, form=form(self._args)))
        if texts:
            separator = self._args.separator
            found.append(data.Text(texts, tokenizer, separator=separator, part=part))
        return found[0] if len(found) == 1 else _Joined(found)


def split(source: FileSource, share: float) -> tuple[Source, Source]:
    """What of a source is trained on and what is held out. Of few documents that know their
    lengths, the last tokens are held out."""
    every = round(1 / share)
    if len(source) >= every or not isinstance(source, SizedSource):
        return data.split(source, min(every, len(source)))
    cut = _end(source, 1 - share)
    parts = _Section(source, 0, cut), _Section(source, cut, int(source.sizes.sum()))
    all_count = not isinstance(source, Encoded)
    if not all(_has_predictions(part, all_count) for part in parts):
        raise ValueError(
            "--data: there are too few tokens to hold some out; give --validation FILE"
        )
    return parts


def _end(source: SizedFileSource, share: float) -> int:
    """After how many tokens a source has had this share of those that count."""
    counts = None
    if isinstance(source, Encoded):
        counts = np.concatenate([source[i].counts for i in range(len(source))])
    total = int(source.sizes.sum() if counts is None else counts.sum())
    kept = max(1, min(round(total * share), total - 2))
    return kept if counts is None else int(np.searchsorted(np.cumsum(counts), kept)) + 1


def _has_predictions(part: _Section, all_count: bool) -> bool:
    """Whether any token after the first one of a document counts."""
    sizes = enumerate(part.sizes)
    return any(size > 1 and (all_count or part[i].counts[1:].any()) for i, size in sizes)
