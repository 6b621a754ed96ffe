"""Tokens in a `.bin` file with a `.idx` file beside it, the format of Megatron that RWKV-LM reads.

The `.bin` file has the tokens of all items one after another. The `.idx` file, in little endian:

    "MMIDIDX\\0\\0", the version 1 as uint64, the code of the dtype of tokens as uint8
    the number of items and that of document bounds, as uint64
    for each item the number of its tokens, as int32
    for each item the byte in the `.bin` file at which it begins, as int64
    for each document the item at which it begins, and then the number of items, as int64

Sources: `RWKV-v7/train_temp/src/binidx.py` of RWKV-LM, which reads it, and `RWKV-v5/make_data.py`,
which writes an item for each document.
"""

import contextlib
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from rwkv_jax import _files
from rwkv_jax.data._documents import BEGIN, Document, checksums

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class BinIdx:
    """A `Source` of the documents in a `.bin` file with a `.idx` file beside it, as RWKV-LM and
    Megatron take them. The tokens stay in the file, which is mapped into memory, and are taken as
    they are: the tools of RWKV-LM have put the token 0 at the end of each document.

    Args:
      path: the path of both files, with or without `.bin` or `.idx`.
      vocab_size: the number of tokens of the model.

    Attributes:
      sizes: the number of tokens of each document.

    Raises:
      FileNotFoundError: one of the files does not exist.
      ValueError: the `.idx` file is none, or of another version; tokens are no integers; a document
        is empty; or the files do not fit each other. Also where a document is read with a token
        that is not below `vocab_size`, or is negative.
    """

    def __init__(self, path: str | os.PathLike[str], *, vocab_size: int):
        self._path, index = _paths(path)
        self._vocab_size = vocab_size
        dtype, self._starts = _documents(index)
        self.sizes = np.diff(self._starts)
        if not self.sizes.all():
            raise ValueError(f"{index}: document {int(np.argmin(self.sizes))} is empty")
        size, told = _files.size(self._path), int(self._starts[-1]) * dtype.itemsize
        if size != told:
            raise ValueError(f"{self._path}: the file has {size} bytes; {index} says {told}")
        self._tokens = np.memmap(self._path, dtype, mode="r")

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, number: int, /) -> Document:
        number = range(len(self))[number]
        return self.part(number, 0, int(self.sizes[number]))

    def part(self, number: int, start: int, stop: int) -> Document:
        """The tokens of a document from `start` on and before `stop`.

        Raises:
          ValueError: a token is not below `vocab_size`, or is negative.
        """
        first, end = self._starts[number : number + 2]
        tokens = np.asarray(self._tokens[first + start : min(first + stop, end)])
        for token in (tokens.min(), tokens.max()):
            if not 0 <= token < self._vocab_size:
                raise ValueError(
                    f"{self.place(number)} has the token {token}; accepted are 0 to "
                    f"{self._vocab_size - 1}"
                )
        return Document(tokens.astype(np.int32), np.ones(len(tokens), bool))

    def place(self, number: int) -> str:
        return f"{self._path}: document {number}"

    def checksums(self) -> list[int]:
        def content(number: int) -> bytes:
            start, end = self._starts[number : number + 2]
            return self._tokens[start : min(end, start + BEGIN)].tobytes()

        return checksums(self, content)


def write_bin_idx(
    path: str | os.PathLike[str], documents: Iterable[ArrayLike], *, dtype: DTypeLike = np.uint16
) -> None:
    """Write files that `BinIdx` reads, and RWKV-LM, which trains on tokens in uint16 alone.

    Args:
      path: the path of both files, with or without `.bin` or `.idx`.
      documents: the tokens [n] of each document. The last one should be 0.
      dtype: the dtype of tokens: uint8, int8, int16, int32, int64 or uint16.

    Raises:
      FileExistsError: there is such a file.
      ValueError: `dtype` is another one; or there are no documents; or one is empty, or has what
        is no such number. No file is left.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    code = next((code for code, x in _DTYPES.items() if kind == x), None)
    if code is None:
        accepted = ", ".join(np.dtype(x).name for x in _DTYPES.values())
        raise ValueError(f"write_bin_idx: dtype is {np.dtype(dtype)}; accepted are {accepted}")
    content, index = _paths(path)
    sizes = []
    with contextlib.ExitStack() as failed, contextlib.ExitStack() as opened:
        file = opened.enter_context(content.open("xb"))
        failed.callback(content.unlink)
        index_file = opened.enter_context(index.open("xb"))
        failed.callback(index.unlink)
        for number, document in enumerate(documents):
            tokens = np.asarray(document)
            integers = tokens.dtype.kind in "iu" and np.array_equal(tokens.astype(kind), tokens)
            if tokens.ndim != 1 or not tokens.size or not integers:
                raise ValueError(
                    f"write_bin_idx: document {number} has the shape {tokens.shape} and numbers in "
                    f"{tokens.dtype}; accepted are one axis and integers that {kind.name} holds"
                )
            file.write(tokens.astype(kind).tobytes())
            sizes.append(len(tokens))
        count = len(sizes)
        if not count:
            raise ValueError("write_bin_idx: there are no documents; accepted are one or more")
        index_file.write(_HEADER.pack(_MAGIC, 1, code, count, count + 1))
        index_file.write(np.array(sizes, "<i4").tobytes())
        starts = np.cumsum([0, *sizes[:-1]], dtype="<i8")[:count]
        index_file.write((starts * kind.itemsize).tobytes())
        index_file.write(np.arange(count + 1, dtype="<i8").tobytes())
        failed.pop_all()


def _paths(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    path = _files.expanded(path)
    if path.suffix in (".bin", ".idx"):
        path = path.with_suffix("")
    return path.with_name(path.name + ".bin"), path.with_name(path.name + ".idx")


def _documents(path: Path) -> tuple[np.dtype, np.ndarray]:
    """The dtype of tokens, and the token at which each document begins and the last one ends."""
    size = _files.size(path)
    with path.open("rb") as file:
        begin = file.read(_HEADER.size)
    _files.refuse_foreign(path, begin)
    if len(begin) < _HEADER.size or not begin.startswith(_MAGIC):
        raise ValueError(f"{path}: the file is no index of tokens, which begins with MMIDIDX")
    _, version, code, items, bounds = _HEADER.unpack(begin)
    if version != 1 or code not in _DTYPES:
        raise ValueError(
            f"{path}: the version is {version} and the code of the dtype {code}; accepted are the "
            f"version 1 and the codes {', '.join(map(str, _DTYPES))}"
        )
    told = _HEADER.size + 12 * items + 8 * bounds
    if size != told or not items:
        raise ValueError(
            f"{path}: the file has {size} bytes; {told} are those of {items} items and {bounds} "
            "bounds of documents, and accepted is at least one item"
        )
    content = np.memmap(path, np.uint8, mode="r", offset=_HEADER.size)
    sizes, pointers, documents = np.split(content, [4 * items, 12 * items])
    starts = np.append(0, np.cumsum(sizes.view("<i4"), dtype=np.int64))
    dtype = np.dtype(_DTYPES[code])
    if np.any(np.diff(starts) < 0) or np.any(pointers.view("<i8") != starts[:-1] * dtype.itemsize):
        raise ValueError(f"{path}: the items do not lie one after another")
    # Files of tools that end no documents have a document for each item.
    documents = documents.view("<i8") if bounds > 1 else np.arange(items + 1)
    if documents[0] != 0 or documents[-1] != items or np.any(np.diff(documents) < 0):
        raise ValueError(f"{path}: the bounds of documents do not go from 0 to {items}")
    return dtype, starts[documents]
