"""Vocabularies as files."""

from collections.abc import Iterable
from pathlib import Path


def write_vocabulary(path: Path, words: Iterable[str] = ()) -> Path:
    """A vocabulary with all bytes and some words."""
    pieces = [repr(bytes([x]) if x > 127 else chr(x)) for x in range(256)]
    lines = [f"{i} {x} 1\n" for i, x in enumerate(pieces, 1)]
    lines += [f"{i} {x!r} {len(x.encode())}\n" for i, x in enumerate(words, 257)]
    path.write_text("".join(lines))
    return path
