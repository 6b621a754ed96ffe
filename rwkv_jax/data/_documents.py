"""What a document is, and how it is made of text."""

import zlib
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from rwkv_jax.tokenizers import Tokenizer

BEGIN = 2**16
"""How many bytes or tokens of a document its checksum is of."""


class Document(NamedTuple):
    """The tokens of a document.

    Attributes:
      tokens: [n] in int32.
      counts: [n] in bool, which of them a model is trained to predict.
    """

    tokens: np.ndarray
    counts: np.ndarray


@runtime_checkable
class Source(Protocol):
    """Documents by number, in any order and from several threads."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int, /) -> Document: ...


class FileSource(Source, Protocol):
    """Documents of files."""

    def place(self, number: int) -> str:
        """Where a document is, for messages: its file, and the line or the number."""
        ...

    def checksums(self) -> list[int]:
        """Checksums of how up to 64 documents begin, from the first one to the last. Most of them
        stay the same where some documents are mended."""
        ...


@runtime_checkable
class SizedSource(Source, Protocol):
    """A source that knows the lengths of its documents without reading them. Long documents are
    read and shuffled in parts.

    Attributes:
      sizes: [documents] in int64, the number of tokens of each.
    """

    sizes: np.ndarray

    def part(self, number: int, start: int, stop: int) -> Document:
        """The tokens of a document from `start` on and before `stop`."""
        ...


def checksums(source: Source, content: Callable[[int], bytes]) -> list[int]:
    """Those of the contents of up to 64 documents of a source, from the first one to the last."""
    numbers = np.linspace(0, len(source) - 1, min(len(source), 64)).astype(int)
    return [zlib.crc32(content(int(number))) for number in numbers]


def encoded(tokenizer: Tokenizer, parts: Iterable[tuple[str, bool]]) -> Document:
    """A document of parts of text, each with whether its tokens count. No token has text of two
    parts. The last token is that of the tokenizer for the end of a document, if it has one,
    which counts if the last part does.

    Raises:
      ValueError: the document has no text, or no token to be predicted that counts.
    """
    tokens, counts, counted, blank = [], [], False, True
    for text, counted in parts:
        found = tokenizer.encode(text)
        tokens += found
        counts += [counted] * len(found)
        blank = blank and not text.strip()
    if blank:
        raise ValueError("the document is empty")
    if tokenizer.end_of_text not in (None, *tokens[-1:]):
        tokens.append(tokenizer.end_of_text)
        counts.append(counted)
    if not any(counts[1:]):
        raise ValueError("the document has no token after the first one that counts")
    return Document(np.array(tokens, np.int32), np.array(counts, bool))
