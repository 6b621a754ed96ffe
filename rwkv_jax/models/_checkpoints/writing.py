"""What all formats need to write arrays to a file."""

import contextlib
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import numpy as np


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


Arrays: TypeAlias = Mapping[str, Stored]


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[io.BufferedWriter]:
    """A new file, which replaces the one at `path` once it is complete."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
