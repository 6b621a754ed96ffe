"""What is checked before a file that may be hostile is read."""

import os
import stat
from pathlib import Path


def size(path: str | os.PathLike[str]) -> int:
    """The number of bytes of a regular file. To open another one, such as a pipe, could wait
    forever.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the path is no regular file.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path}: the path is no regular file")
    return status.st_size


def content(path: str | os.PathLike[str], most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the path is no regular file, or the file is larger.
    """
    if (count := size(path)) > most:
        raise ValueError(f"{path}: the file has {count} bytes; accepted are at most {most}")
    with Path(path).open("rb") as file:
        return file.read(most)
