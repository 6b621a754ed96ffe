"""What commands write: files, sizes and tables."""

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

from rwkv_jax import _files

SESSIONS = (".safetensors",)


def check_target(name: str, path: str, endings: Collection[str]) -> None:
    """Check that a command can write what its argument `name` asks for: the file `path` with one of
    `endings`, or without them the folder `path` with a checkpoint, which is made if need be.

    A command calls this before the work whose result it writes.

    Raises:
      ValueError: it cannot be written.
    """
    # Not imported by commands that only ask for help.
    from rwkv_jax.models._checkpoints import writing

    writing.check_target(name, path, endings)
    target = _files.expanded(path)
    folder = target.parent
    if not endings:
        folder = next(x for x in (target, *target.parents) if x.exists())
    try:
        # An attempt tells more than permissions do: a file system may be read-only.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{name} is {path}; accepted is {writing.accepted_target(endings)} that can be "
            f"written, but {folder}: {error.strerror}"
        ) from None


def refuse_existing(target: Path, force: bool) -> None:
    """Raise a `ValueError` if a command without `--force` would replace a file, or a folder that
    has something."""
    if not force and (any(target.iterdir()) if target.is_dir() else target.exists()):
        raise ValueError(f"{target} exists; --force replaces it")


def in_bytes(size: int) -> str:
    """A number of bytes as a text with a unit, such as "1.5 MB", which is 1500000 bytes."""
    number, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{number:.3g} {unit}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts, with columns of one width. The first column is aligned to the left; so is the
    last one of two, and others are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = "<" if len(widths) == 2 else ">"
    lines = []
    for first, *others in rows:
        cells = (f"{x:{align}{width}}" for x, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)
