"""Ranges of bytes in files, one for each document."""

import os
from collections.abc import Callable, Iterable
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


class Ranges:
    """Where documents are in files, which are opened for each document that is read.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: there are no paths; or a file is no regular one, or a pointer of Git LFS or a GGUF
        file; or it has no document.
    """

    def __init__(self, paths: Paths, find: Find | None):
        """`find` is None where each file is a document."""
        paths = [paths] if isinstance(paths, str | os.PathLike) else paths
        self._paths = [_files.expanded(path) for path in paths]
        if not self._paths:
            raise ValueError("data: there are no paths; accepted are one and several")
        found = [_found(path, find) for path in self._paths]
        self._starts, self._ends = (np.concatenate(x) for x in zip(*found, strict=True))
        self._after = np.cumsum([len(starts) for starts, _ in found])

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, number: int) -> bytes:
        """The bytes of a document.

        Raises:
          ValueError: the file has become shorter.
        """
        start, end = int(self._starts[number]), int(self._ends[number])
        with self._path(number).open("rb") as file:
            file.seek(start)
            content = file.read(end - start)
        if len(content) < end - start:
            raise ValueError("the file has become shorter")
        return content

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


def _found(path: Path, find: Find | None) -> tuple[np.ndarray, np.ndarray]:
    size = _files.size(path)
    with path.open("rb") as file:
        _files.refuse_foreign(path, file.read(_files.BEGIN), accept_pages=True)
    if size == 0:
        raise ValueError(f"{path}: the file is empty")
    if find is None:
        return np.array([0]), np.array([size])
    starts, ends = find(np.memmap(path, np.uint8, mode="r"))
    if not len(starts):
        raise ValueError(f"{path}: the file has no document")
    return starts, ends


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
