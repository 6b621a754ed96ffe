"""Tensors of files, as views of the mapped files."""

import math
import os
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from rwkv_jax import _files

Mapped: TypeAlias = np.memmap

_MAX_TENSORS = 2**13
MAX_DESCRIPTION = 256 * _MAX_TENSORS
"""The most bytes of what describes tensors: the headers of safetensors files and the pickles of
archives, their directories, an index, or a configuration. Files of other programs have 100 to 150
for each tensor."""
FILES, TENSORS, MEMBERS = "files", "tensors", "members of archives"
BYTES, DIRECTORY = "bytes that describe tensors", "bytes of directories of archives"
INSTRUCTIONS = "instructions of pickles"
_MOST = {
    FILES: 2**10,
    TENSORS: _MAX_TENSORS,
    MEMBERS: _MAX_TENSORS,
    BYTES: MAX_DESCRIPTION,
    DIRECTORY: MAX_DESCRIPTION,
    # torch.save writes 32 to 50 for each tensor, and `save` 32.
    INSTRUCTIONS: 40 * _MAX_TENSORS,
}
"""The limits for all files of a checkpoint together. RWKV-7 with 61 blocks has 2,000 tensors."""

_SHOWN = 20


class Tensor(NamedTuple):
    """A tensor and the name of its file. The array is a view of the file and cannot be written."""

    array: np.ndarray
    file: str

    def described(self) -> str:
        return described(self.array.shape)


class Allowance:
    """What the files of a checkpoint that were not read yet may have of each kind of `_MOST`."""

    def __init__(self) -> None:
        self.left = dict(_MOST)

    def take(self, what: str, count: int, of: str) -> None:
        """Raise an error that begins with `what` if there are too many."""
        self.left[of] -= count
        if self.left[of] < 0:
            raise ValueError(
                f"{what}: with its {count} {of} all files of a checkpoint have too many; accepted "
                f"are at most {_MOST[of]}"
            )


def listed(wrong: Sequence[str]) -> str:
    """The lines of an error for all tensors that are wrong, of which the first ones are shown."""
    more = f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "\n  ".join(["", *wrong[:_SHOWN]]) + more


def described(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def quoted(name: str) -> str:
    """A text of a file for an error message: without control characters, and not too long."""
    return repr(name if len(name) <= 100 else name[:100] + "...")


def is_size(x: object) -> bool:
    """Whether `x` is an integer that can be a size, an offset or a stride."""
    return type(x) is int and 0 <= x < 2**63


def mapped(path: str | os.PathLike[str]) -> Mapped:
    """The bytes of a file.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty, no regular one, or one of another program.
    """
    if _files.size(path) == 0:
        raise ValueError(f"{path}: the file is empty")
    found = np.memmap(path, np.uint8, "r")
    _files.refuse_foreign(path, found[: _files.BEGIN].tobytes())
    return found


def view(
    what: str,
    data: Mapped,
    start: int,
    dtype: np.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
) -> np.ndarray:
    """The view of checked bytes from `start` on; strides are in elements.

    Raises:
      ValueError: the tensor has no elements, and its other sizes are too large for an array. The
        message begins with `what`.
    """
    if math.prod(shape) == 0:
        if math.prod(n for n in shape if n) * dtype.itemsize >= 2**63:
            raise ValueError(f"{what} is {described(shape)}, which is too large for an array")
        return np.zeros(shape, dtype)
    if strides is None:
        return np.ndarray(shape, dtype, data, start)
    # The stride of an axis with one element counts for nothing and may be of any size.
    steps = (stride if n > 1 else 0 for n, stride in zip(shape, strides, strict=True))
    return np.ndarray(shape, dtype, data, start, tuple(n * dtype.itemsize for n in steps))


FLOATS = {
    name: np.dtype(getattr(jnp, name)) for name in ("bfloat16", "float16", "float32", "float64")
}
INTEGERS = {name: np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "bool")}
