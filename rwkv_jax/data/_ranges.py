"""Ranges of bytes in files, one for each document."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np

from rwkv_jax import _files

Paths: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
Find: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""The starts and the ends of the documents in a file, from its bytes."""

_LINE = 10
_RETURN = 13
_BLOCK = 2**26
_LONG = 2**22
_LINE_AT_MOST = 2**12


class Ranges:
    """Where documents are in files, which are opened for each document that is read.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there are no paths; or a file is no regular one, or a pointer of Git LFS or a GGUF
        file; or it has no document.
    """

    def __init__(self, paths: Paths, find: Find | None, part: int | None = None):
        """`find` is None where each file is a document. Those of more than 4 MiB are cut into parts
        of about `part` bytes, if that is not None, each of which is then a document."""
        paths = [paths] if isinstance(paths, str | os.PathLike) else paths
        self._paths = [_files.expanded(path) for path in paths]
        if not self._paths:
            raise ValueError("data: there are no paths; accepted are one and several")
        found = [_found(path, find, part) for path in self._paths]
        of_all = (np.concatenate(x) for x in zip(*found, strict=True))
        self._starts, self._ends, self._last = of_all
        self._after = np.cumsum([len(starts) for starts, _, _ in found])

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int, most: int | None = None) -> bytes:
        """The bytes of a document, or the first ones of them.

        Raises:
          ValueError: the file has become shorter.
        """
        start, end = int(self._starts[number]), int(self._ends[number])
        end = end if most is None else min(end, start + most)
        with self._path(number).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        if len(content) < end - start:
            raise ValueError("the file has become shorter")
        return content

    def is_last(self, number: int) -> bool:
        """Whether this is all of a document, or its last part."""
        return bool(self._last[number])

    def place(self, number: int) -> str:
        """The file and the line where a document begins, for messages."""
        path, start = self._path(number), int(self._starts[number])
        lines = 1
        with path.open("rb") as file:
            while block := file.read(min(_BLOCK, start - file.tell())):
                lines += block.count(b"\n")
        return f"{path}: line {lines}"

    def _path(self, number: int) -> Path:
        return self._paths[int(np.searchsorted(self._after, number, side="right"))]


def _found(
    path: Path, find: Find | None, part: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The starts and the ends of documents, or of their parts, and which of these are the last."""
    size = _files.size(path)
    with path.open("rb") as file:
        _files.refuse_foreign(path, file.read(_files.BEGIN), accept_pages=True)
    if size == 0:
        raise ValueError(f"{path}: the file is empty")
    content = np.memmap(path, np.uint8, mode="r")
    starts, ends = (np.array([0]), np.array([size])) if find is None else find(content)
    if not len(starts):
        raise ValueError(f"{path}: the file has no document")
    inner = np.zeros(0, int)
    if part is not None:
        long = ends - starts > _LONG
        spans = zip(starts[long].tolist(), ends[long].tolist(), strict=True)
        inner = np.array([x for span in spans for x in _cuts(content, *span, part)], int)
    last = np.sort(np.append(inner, ends))
    return np.sort(np.append(starts, inner)), last, np.isin(last, ends)


def _cuts(content: np.ndarray, start: int, end: int, part: int) -> Iterator[int]:
    """Where parts of about equal sizes begin, but for the first one: at a line, or where none
    begins soon, at a character of UTF-8."""
    for place in np.linspace(start, end, max(2, round((end - start) / part)), endpoint=False)[1:]:
        at = int(place)
        following = content[at : min(at + min(part // 2, _LINE_AT_MOST), end)].tobytes()
        line = following.find(b"\n") + 1
        yield at + (line or next((i for i, x in enumerate(following) if x & 0xC0 != 0x80), 0))


def lines(content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lines that are not empty."""
    blocks = range(0, len(content), _BLOCK)
    ends = np.concatenate([np.flatnonzero(content[i : i + _BLOCK] == _LINE) + i for i in blocks])
    if content[-1] != _LINE:
        ends = np.append(ends, len(content))
    starts = np.append(0, ends[:-1] + 1)
    full = ends > starts
    full[full] = (ends - starts > 1)[full] | (content[starts[full]] != _RETURN)
    return starts[full], ends[full]
