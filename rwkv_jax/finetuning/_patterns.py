"""Patterns of names."""

import fnmatch
from collections.abc import Iterable


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns of a shell, with `*`, `?` and `[...]`, is that of the name, or of
    an end of it after a dot."""
    return any(fnmatch.fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns)
