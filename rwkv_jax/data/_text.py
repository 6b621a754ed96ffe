"""Plain text."""

import itertools
import re

import numpy as np

from rwkv_jax._operator import check
from rwkv_jax.data._documents import BEGIN, Document, checksums, encoded
from rwkv_jax.data._ranges import Paths, Ranges
from rwkv_jax.tokenizers import Tokenizer

_BLANK_LINES = re.compile(rb"(?m)^(?:[ \t\r]*\n)+")


class Text:
    """A `Source` of the documents in files of plain text in UTF-8.

    After the tokens of a document comes `end_of_text` of the tokenizer, if it has one.

    Args:
      paths: a file or several.
      tokenizer: what makes tokens of the text.
      separator: the line between two documents of a file, such as "<|endoftext|>", or "" for blank
        lines. New lines in front of it belong to it. If None, each file is a document.
      part: documents of more than 4 MiB are cut into parts of about so many bytes, from 1024 on,
        where lines end. Each part is then a document, which is read when its turn comes. If None, a
        document is read as a whole.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is empty, or no regular one; or `separator` is no line. Also where a
        document is read that is empty or no UTF-8, with its file and line.
    """

    def __init__(
        self,
        paths: Paths,
        tokenizer: Tokenizer,
        *,
        separator: str | None = None,
        part: int | None = None,
    ):
        if separator is not None and separator.splitlines() not in ([], [separator]):
            raise ValueError(f"Text: separator is {separator!r}; accepted is one line, without end")
        if part is not None:
            check.number("Text", "part", part, 2**10)
        self._tokenizer, self._separated = tokenizer, separator is not None
        find = None if separator is None else _Separated(separator)
        self._ranges = Ranges(paths, find, part)

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, number: int, /) -> Document:
        number = range(len(self))[number]
        try:
            text, last = self._ranges.read(number).decode("utf-8-sig"), self._ranges.is_last(number)
            text = text.rstrip("\r\n") if self._separated and last else text
            if last and (number == 0 or self._ranges.is_last(number - 1)):
                return encoded(self._tokenizer, [(text, True)])
            # A part of a document may be blank.
            tokens, end = self._tokenizer.encode(text), self._tokenizer.end_of_text
            if last and end not in (None, *tokens[-1:]):
                tokens = [*tokens, end]
            return Document(np.array(tokens, np.int32), np.ones(len(tokens), bool))
        except ValueError as error:
            raise ValueError(f"{self._ranges.place(number)}: {error}") from None

    def place(self, number: int) -> str:
        return self._ranges.place(range(len(self))[number])

    def checksums(self) -> list[int]:
        return checksums(self, lambda number: self._ranges.read(number, BEGIN))


class _Separated:
    """The ranges between separators. What is before the first one or after the last one is no
    document if it is blank."""

    def __init__(self, separator: str):
        line = rb"(?m)^" + re.escape(separator.encode()) + rb"\r?(?:\n|\Z)"
        self._separator = re.compile(line) if separator else _BLANK_LINES

    def __call__(self, content: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        separators = (x.span() for x in self._separator.finditer(content.data))
        places = np.fromiter(itertools.chain.from_iterable(separators), np.int64)
        starts, ends = np.append(0, places[1::2]), np.append(places[::2], len(content))
        for edge in (0, -1):
            if len(starts) and not content[starts[edge] : ends[edge]].tobytes().strip():
                starts, ends = np.delete(starts, edge), np.delete(ends, edge)
        return starts, ends
