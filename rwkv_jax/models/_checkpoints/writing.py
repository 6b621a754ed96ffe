"""What all formats need to write arrays to a file."""

import contextlib
import io
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from rwkv_jax import _files
from rwkv_jax._operator import check
from rwkv_jax.models._checkpoints.tensors import FLOATS, quoted


class Stored(NamedTuple):
    """An array and the shape that it has in a file, where it may also be transposed."""

    array: jax.Array | np.ndarray
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    def content(self) -> memoryview:
        """The bytes of the array in the file."""
        x = self.array
        if isinstance(x, jax.Array):
            # A JAX array keeps its copy on the host as long as it lives, so a copy of it gets one.
            x = np.asarray(jax.device_put(x, x.sharding, may_alias=False))
        return np.ascontiguousarray(x.T if self.transposed else x).reshape(-1).view(np.uint8).data

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.array.dtype.itemsize


def check_arrays(what: str, arrays: Mapping[str, Any]) -> None:
    """Raise an error that begins with `what` unless `load` accepts arrays of their types by these
    names: the weights that have a scale are of int8, and all others are floats."""
    for name, x in arrays.items():
        check.array(what, name, x)
        stem, _, last = name.rpartition(".")
        quantised = last != "scale" and f"{stem}.scale" in arrays
        accepted = ("int8",) if quantised else tuple(FLOATS)
        if str(x.dtype) not in accepted:
            raise TypeError(f"{what}: {name} is {x.dtype}; accepted are {', '.join(accepted)}")


ENDINGS = (".safetensors", ".pth")
"""The endings of the files of checkpoints."""


INDEX = ".index.json"
PATTERNS = ("*.safetensors" + INDEX, "*.safetensors", "*" + INDEX, "*.pth", "pytorch_model.bin")
"""The files of a checkpoint in a folder. The first pattern that fits tells which one is read."""
IN_FOLDER = "model.safetensors"
"""The file that is written in a folder."""


def accepted_target(endings: Collection[str]) -> str:
    """What may be written: a file with one of these endings, or without them a folder."""
    return f"a file {' or '.join(endings)}" if endings else "a folder"


def check_target(what: str, path: str | os.PathLike[str], endings: Collection[str]) -> None:
    """Raise an error that begins with `what` unless the path is one of `accepted_target`. A folder
    has no other checkpoint, which would be read in place of the new one, or beside it."""
    target = _files.expanded(path)
    fits = target.suffix in endings if endings else target.suffix not in ENDINGS
    if not fits or (endings and target.is_dir()):
        found = ", which is a folder" if target.is_dir() else ""
        raise ValueError(f"{what} is {path}{found}; accepted is {accepted_target(endings)}")
    others = (x.name for pattern in PATTERNS for x in target.glob(pattern) if not endings)
    if other := next((name for name in others if name != IN_FOLDER), None):
        raise ValueError(
            f"{what} is {path}, which has the checkpoint {quoted(other)}; accepted is a folder "
            "without another checkpoint"
        )


Arrays: TypeAlias = Mapping[str, Stored]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """A new file, which replaces the one at `path` once it is complete.

    Raises:
      OSError: there can be no file in the folder, which the error names; or the file cannot be
        written, such as where there is no room, and the error names it.
    """
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.touch(exist_ok=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path.parent)) from None
    try:
        with open(part, "wb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        if error.filename or not error.errno:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)
