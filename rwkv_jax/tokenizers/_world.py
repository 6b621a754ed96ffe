"""The tokenizer of the RWKV World models: the longest token that fits, from the left.

A vocabulary is a text file with a line for each token: its number, its text as a literal of Python,
a string or bytes, and how many bytes that is. The published file comes with Python packages. One of
them, pyrwkv-tokenizer, encodes text ten times as fast as the function here, which encodes where
there is no such package. It does not decode: it ends with a panic of Rust where tokens are no
complete characters.
"""

import ast
import contextlib
import importlib.util
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rwkv_jax import _files
from rwkv_jax.tokenizers._tokenizer import Tokenizer

FILE = "rwkv_vocab_v20230424.txt"
"""The name of the published vocabulary."""

VOCABULARY = 65536
"""The size of the vocabulary of the World models. The last few tokens have no text."""

END_OF_TEXT = 0

_PACKAGES = ("rwkv", "pyrwkv_tokenizer")
_LARGEST_FILE = 2**23
"""The most bytes of a file: seven times as many as the published one has."""

# Python takes up to 500 bytes for each character of a literal that it parses. The lines of the
# published vocabulary have at most 140 characters.
_LINE = re.compile(r"(\d{1,9}) (b?['\"].{1,4000}) (\d{1,9})")
_PLAIN = re.compile(r"'([^'\\]*)'")


def published() -> Path:
    """The published vocabulary, in a package that is installed. The package is not imported.

    Raises:
      ImportError: no package that has the vocabulary is installed.
    """
    for package in _PACKAGES:
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            if (path := Path(folder) / FILE).is_file():
                return path
    raise ImportError(
        f"the tokenizer 'world' needs {FILE} of the package rwkv: pip install 'rwkv-jax[text]'"
    )


def world(name: str, path: Path | None, vocabulary: int | None) -> Tokenizer:
    """The tokenizer of the vocabulary in a file, or of the published one if `path` is None.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: as `published` raises it.
      ValueError: the file is larger than `_LARGEST_FILE` or no regular one, it is no vocabulary, or
        has tokens that are not below `vocabulary`.
    """
    pieces = read(path or published())
    size = max(pieces) + 1 if vocabulary is None else vocabulary
    # The package has rules of its own for the literals in a file, so that only of the published one
    # it is known to read what Python reads.
    encode = (_fast_encoder() if path is None else None) or Longest(pieces)
    return Tokenizer(name, size, pieces, encode, END_OF_TEXT)


def encoder(pieces: Mapping[int, bytes]) -> Callable[[str], list[int]]:
    """The encoder for these tokens: that of a package if they are the published ones and it is
    installed."""
    with contextlib.suppress(ImportError):
        if pieces == read(published()):
            return _fast_encoder() or Longest(pieces)
    return Longest(pieces)


def _fast_encoder() -> Callable[[str], list[int]] | None:
    """The encoder of pyrwkv-tokenizer, if it is installed."""
    try:
        from pyrwkv_tokenizer import RWKVTokenizer
    except ImportError:
        return None
    return RWKVTokenizer().encode


def read(path: Path) -> dict[int, bytes]:
    """The bytes of each token."""
    pieces: dict[int, bytes] = {}
    try:
        text = _files.content(path, _LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the file is no text in UTF-8: {error}") from None
    # Lines may end as on Windows.
    lines = io.StringIO(text, newline=None).read().split("\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        token, piece = _token(path, number, line)
        if token in pieces or token == END_OF_TEXT:
            raise ValueError(f"{path}: line {number} has the token {token}, which is taken")
        pieces[token] = piece
    missing = {bytes([byte]) for byte in range(256)} - set(pieces.values())
    if missing:
        raise ValueError(f"{path}: there is no token for the byte {min(missing)[0]}")
    return pieces


def _token(path: Path, number: int, line: str) -> tuple[int, bytes]:
    """A token and its bytes, from a line."""
    if found := _LINE.fullmatch(line):
        # Most lines are plain, and the parser of Python takes a second for 65529 lines.
        plain = _PLAIN.fullmatch(found[2])
        try:
            piece = plain[1] if plain else ast.literal_eval(found[2])
            piece = piece.encode() if isinstance(piece, str) else piece
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            piece = b""
        if isinstance(piece, bytes) and 0 < len(piece) == int(found[3]):
            return int(found[1]), piece
    raise ValueError(
        f"{path}: line {number} is {line!r:.100}; accepted is a line such as 301 ' \"' 2"
    )


class Longest:
    """The tokens of a text: again and again the longest token that the rest begins with."""

    def __init__(self, pieces: Mapping[int, bytes]):
        self._tokens = {piece: token for token, piece in pieces.items()}
        lengths: dict[bytes, set[int]] = {}
        for piece in self._tokens:
            if len(piece) > 1:
                lengths.setdefault(piece[:2], set()).add(len(piece))
        # The lengths to try, by the next two bytes. At the end of the text the rest is shorter.
        self._lengths = {start: sorted(x, reverse=True) for start, x in lengths.items()}

    def __call__(self, text: str) -> list[int]:
        data, tokens, lengths = text.encode(), self._tokens, self._lengths
        found, start = [], 0
        while start < len(data):
            for length in (*lengths.get(data[start : start + 2], ()), 1):
                piece = data[start : start + length]
                if piece in tokens:
                    found.append(tokens[piece])
                    start += len(piece)
                    break
        return found
