"""Documents that are held out."""

from typing import Any

import numpy as np

from rwkv_jax.data._documents import Document, SizedSource, Source


def split(source: Source, every: int = 20) -> tuple[Source, Source]:
    """A source as two, of which the second one has one document of every so many, to validate with.

    Of the documents 0 to every - 1, every to 2 every - 1, and so on, one each is held out. A hash
    of its number says which, so that documents that are added at the end change nothing.

    Args:
      source: the source.
      every: of how many documents one is held out, from 2 on.

    Raises:
      ValueError: `every` is less than 2 or the source has fewer documents.
    """
    if not 2 <= every <= len(source):
        raise ValueError(
            f"split: every is {every}; accepted are 2 to {len(source)}, the number of documents"
        )
    if isinstance(source, SizedSource):
        return _SizedPart(source, every, False), _SizedPart(source, every, True)
    return _Part(source, every, False), _Part(source, every, True)


class _Part:
    """The documents that are held out, or the others."""

    def __init__(self, source: Source, every: int, held_out: bool):
        self._source, self._every, self._held_out = source, every, held_out
        groups, rest = divmod(len(source), every)
        held = groups + int(_chosen(np.array([groups]), every)[0] < rest)
        self._len = held if held_out else len(source) - held

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, number: int, /) -> Document:
        return self._source[self._number(number)]

    def place(self, number: int) -> str:
        """Where the source says that a document is, if it does."""
        source: Any = self._source
        return source.place(self._number(number))

    def _number(self, number: int) -> int:
        return int(self._numbers(np.array([range(self._len)[number]]))[0])

    def _numbers(self, numbers: np.ndarray) -> np.ndarray:
        """The numbers in the source of documents of this part."""
        group, place = numbers, 0
        if not self._held_out:
            group, place = np.divmod(numbers, self._every - 1)
        chosen = _chosen(group, self._every)
        place = chosen if self._held_out else place + (place >= chosen)
        return group * self._every + place


class _SizedPart(_Part):
    """The same of a source that knows the lengths of its documents."""

    def __init__(self, source: SizedSource, every: int, held_out: bool):
        super().__init__(source, every, held_out)
        self._sized = source
        self.sizes = source.sizes[self._numbers(np.arange(len(self)))]

    def part(self, number: int, start: int, stop: int) -> Document:
        return self._sized.part(self._number(number), start, stop)


def _chosen(group: np.ndarray, every: int) -> np.ndarray:
    """Which document of each group is held out."""
    x = group.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ x >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return ((x ^ x >> np.uint64(32)) % np.uint64(every)).astype(np.int64)
