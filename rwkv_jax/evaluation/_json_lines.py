"""Texts in JSON Lines."""

import json
import os
from collections.abc import Iterator

from rwkv_jax import _files


def texts(path: str | os.PathLike[str]) -> Iterator[tuple[str, str]]:
    """The texts of a file with an object `{"text": ...}` in each line, each after its place in the
    file. Other keys and lines of whitespace are ignored.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a line is not such an object in UTF-8, or its text is empty or no Unicode. The
        message begins with the path and the number of the line.
    """
    with _files.expanded(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}: line {number}"
                yield place, _text(place, line)


def _text(place: str, line: bytes) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place}: the line is no JSON: {error}") from None
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(f'{place}: accepted is {{"text": ...}} with a text that is not empty')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place}: the text is no Unicode: {error}") from None
    return text
