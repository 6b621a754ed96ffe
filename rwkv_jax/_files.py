"""What paths say, and what is checked before a file that may be hostile is read."""

import contextlib
import math
import os
import stat
from pathlib import Path

BEGIN = 64
"""How many bytes of a file tell what it is."""

_FOREIGN = {
    b"version https://git-lfs": "a pointer of Git LFS; `git lfs pull` gets what it points to",
    b"GGUF": "of GGUF, the format of llama.cpp",
}
_PAGES = dict.fromkeys(
    (b"<!doctype html", b"<html"), "an HTML page, such as a download that failed gives"
)
"""How files begin that are often in the place of another one."""


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with the home directory in place of `~`.

    Raises:
      ValueError: it is empty, or there is no such user.
    """
    if not os.fspath(path):
        raise ValueError("the path is empty; accepted is that of a file or a folder")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None


def weighted(option: str, text: str) -> tuple[Path, float]:
    """The path and the weight in FILE or FILE=WEIGHT.

    Raises:
      ValueError: the weight is no positive number.
    """
    path, equals, weight = text.rpartition("=")
    if not equals or os.path.exists(text):
        return expanded(text), 1.0
    with contextlib.suppress(ValueError):
        if 0 < float(weight) < math.inf:
            return expanded(path), float(weight)
    raise ValueError(
        f"{option} is {text}, whose weight is {weight!r}; accepted are FILE and FILE=WEIGHT, with "
        "a positive number"
    )


def refuse_foreign(
    path: str | os.PathLike[str], begin: bytes, *, accept_pages: bool = False
) -> None:
    """Raise an error that says what a file is that begins so, if it is often in the place of
    another one. Pages of HTML are, unless they are accepted."""
    begin = begin.lstrip()
    for start, what in (_FOREIGN if accept_pages else _FOREIGN | _PAGES).items():
        if begin[: len(start)].lower() == start.lower():
            raise ValueError(f"{path}: the file is {what}")


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
      ValueError: the path is no regular file, or the file is larger, or it is a pointer of Git LFS,
        a GGUF file or an HTML page.
    """
    if (count := size(path)) > most:
        raise ValueError(f"{path}: the file has {count} bytes; accepted are at most {most}")
    with Path(path).open("rb") as file:
        found = file.read(most)
    refuse_foreign(path, found[:BEGIN])
    return found
