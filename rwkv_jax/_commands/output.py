"""How commands write sizes and tables."""

from collections.abc import Sequence


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
