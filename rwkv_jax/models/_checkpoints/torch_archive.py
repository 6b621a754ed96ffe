"""The zip archive that torch.save writes, whose members are not compressed.

NAME/data.pkl     a pickle of everything but the contents of tensors
NAME/byteorder    little or big
NAME/data/KEY     the contents of the storage KEY, which tensors are views of

The directory of the archive has a checksum of each member. Those of large members are not looked
at, because this would take a second for each gigabyte.
"""

import io
import itertools
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rwkv_jax.models._checkpoints import torch_pickle
from rwkv_jax.models._checkpoints.tensors import (
    BYTES,
    DIRECTORY,
    MEMBERS,
    Allowance,
    Mapped,
    Tensor,
    quoted,
    view,
)
from rwkv_jax.models._checkpoints.torch_pickle import Storage, View
from rwkv_jax.models._checkpoints.writing import Arrays, replacing

MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENTRY_MAGIC = b"PK\x01\x02"
_ENTRY = struct.Struct("<28x3H12x")
"""An entry of the directory: the sizes of the name, of the extra field and of the comment."""
_LONGEST_EXTRA = 1024
"""The most bytes of an extra field. zipfile takes a time for it that is quadratic in its size."""
_ENCRYPTED = 1
_OTHERS = 3
"""The members that `write` makes beside tensors."""
# Of contents and of the zip format, whose fields for larger files are another 20 bytes of a header.
_ALIGNMENT = 64
_LARGE = 2**31
_LARGE_FIELDS = 20
_CHECKED = 2**14
"""The most bytes of a member whose checksum is looked at, but for the pickle."""


class _Member(NamedTuple):
    start: int
    size: int
    checksum: int


class _Archive(io.FileIO):
    """A file whose zip directory is not read if it is too large. zipfile reads it at once."""

    def __init__(self, file: str, allowance: Allowance):
        super().__init__(file)
        self._allowance = allowance

    def read(self, size: int | None = -1, /) -> bytes:
        size = -1 if size is None else size
        self._allowance.take("the directory", max(size, 0), DIRECTORY)
        found, at = super().read(size), 0
        # zipfile also reads the end of the file, which may begin with anything.
        while found.startswith(_ENTRY_MAGIC, at) and at + _ENTRY.size <= len(found):
            sizes = _ENTRY.unpack_from(found, at)
            if sizes[1] > _LONGEST_EXTRA:
                raise ValueError(
                    f"an extra field has {sizes[1]} bytes; accepted are at most {_LONGEST_EXTRA}"
                )
            at += _ENTRY.size + sum(sizes)
        return found


def read(data: Mapped, file: str, allowance: Allowance) -> dict[str, Tensor]:
    """The tensors of a mapped file. They are views of it; nothing of the pickle is executed.

    Raises:
      ValueError: the file has anything but a dictionary of tensors, is compressed or damaged, or
        has more than is allowed.
    """
    members = _members(data, file, allowance)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError(f"{file}: {len(pickles)} members are a data.pkl; accepted is one")
    folder = pickles[0].removesuffix("data.pkl")

    def content(name: str) -> bytes:
        start, size, checksum = members[name]
        found = data[start : start + size].tobytes()
        # torch.save can be told to compute none, and then writes 0.
        if checksum and zlib.crc32(found) != checksum:
            raise ValueError(
                f"{file}: the member {quoted(name)} has another checksum than the directory of the "
                "archive says"
            )
        return found

    for name, member in members.items():
        if member.size <= _CHECKED:
            content(name)
    order = f"{folder}byteorder"
    if order in members and (members[order].size > _CHECKED or content(order) != b"little"):
        raise ValueError(f"{file}: the byte order is not little-endian")

    allowance.take(file, members[pickles[0]].size, BYTES)
    pickled = content(pickles[0])
    try:
        views = torch_pickle.read(pickled, allowance)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    _check_total(views, len(data), file)
    found = {}
    for name, (storage, offset, shape, strides) in views.items():
        what = f"{file}: {quoted(name)}"
        start = _start(what, members, f"{folder}data/{storage.key}", storage)
        start += offset * storage.dtype.itemsize
        found[name] = Tensor(view(what, data, start, storage.dtype, shape, strides), file)
    return found


def _start(what: str, members: Mapping[str, _Member], name: str, storage: Storage) -> int:
    """Where the contents of a storage begin, which are in the member `name`."""
    if name not in members:
        raise ValueError(f"{what} is in the member {quoted(name)}, which is missing")
    start, size, _ = members[name]
    needed = storage.size * storage.dtype.itemsize
    if size != needed:
        raise ValueError(
            f"{what} is in the member {quoted(name)}, which has {size} bytes; its storage has "
            f"{needed}"
        )
    return start


def _check_total(views: Mapping[str, View], size: int, file: str) -> None:
    """One storage may serve two tensors, as in a model whose head is its embedding. Were it to
    serve all of them, a small file would fill the memory."""
    total = sum(x.size * x.storage.dtype.itemsize for x in views.values())
    if total > 2 * size:
        raise ValueError(
            f"{file}: the tensors have {total} bytes together; accepted is up to twice the "
            f"size of the file, {size}"
        )


def _members(data: Mapped, file: str, allowance: Allowance) -> dict[str, _Member]:
    """The bytes of each member."""
    try:
        with _Archive(file, allowance) as opened, zipfile.ZipFile(opened) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise ValueError(
            f"{file}: the zip archive is damaged, cut off or too large: {error}"
        ) from None
    allowance.take(file, len(infos), MEMBERS)
    members, places = {}, []
    for info in infos:
        what = f"{file}: the member {quoted(info.filename)}"
        if info.filename in members:
            raise ValueError(f"{what} occurs twice")
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise ValueError(f"{what} is compressed; torch.save does not compress")
        if info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{what} is encrypted")
        begin = info.header_offset
        header = data[begin : begin + _LOCAL_HEADER.size].tobytes() if begin >= 0 else b""
        if len(header) < _LOCAL_HEADER.size or not header.startswith(MAGIC):
            raise ValueError(f"{what} has no header")
        *_, name_size, extra_size = _LOCAL_HEADER.unpack(header)
        start = begin + _LOCAL_HEADER.size + name_size + extra_size
        if start + info.file_size > len(data):
            raise ValueError(f"{what} ends after the file")
        members[info.filename] = _Member(start, info.file_size, info.CRC)
        places.append((begin, start + info.file_size))
    places.sort()
    for (_, end), (begin, _) in itertools.pairwise(places):
        if begin < end:
            raise ValueError(f"{file}: members of the zip archive overlap")
    return members


def write(path: Path, arrays: Arrays) -> None:
    """Write named arrays. One of them at a time is on the host.

    Raises:
      ValueError: they are more than `read` accepts.
    """
    Allowance().take(str(path), len(arrays) + _OTHERS, MEMBERS)
    views = {}
    for i, (name, x) in enumerate(arrays.items()):
        strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape)))
        storage = Storage(np.dtype(x.array.dtype), str(i), math.prod(x.shape))
        views[name] = View(storage, 0, x.shape, strides)
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        _add(archive, "data.pkl", torch_pickle.write(views))
        _add(archive, "byteorder", b"little")
        for view, x in zip(views.values(), arrays.values(), strict=True):
            _add(archive, f"data/{view.storage.key}", x.content())
        _add(archive, "version", b"3\n")


def _add(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    """Add a member that is aligned by a field of its header, as torch.save does it."""
    info = zipfile.ZipInfo(f"archive/{name}")
    large = len(content) >= _LARGE
    assert archive.fp is not None
    start = archive.fp.tell() + _LOCAL_HEADER.size + len(info.filename) + 4
    padding = -(start + _LARGE_FIELDS * large) % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=large) as member:
        member.write(content)
    info.extra = b""
