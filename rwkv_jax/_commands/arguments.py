"""Arguments that several commands have, and how they write sizes."""

import argparse

DTYPES = ("bfloat16", "float16", "float32")


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    """The checkpoint that a command reads."""
    parser.add_argument(
        name,
        metavar=name.upper(),
        help="a .pth or .safetensors file, the index of several, or a folder with one of these",
    )


def add_dtype(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    """The name of a dtype. `meaning` says what has the dtype."""
    parser.add_argument("--dtype", choices=DTYPES, default=default, help=meaning)


def positive(text: str) -> int:
    """The integer above 0 in an argument.

    Raises:
      ArgumentTypeError: there is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def in_bytes(size: int) -> str:
    """A number of bytes as a text with a unit, such as "1.5 MB", which is 1500000 bytes."""
    number, unit = float(size), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if number < 1000:
            break
        number, unit = number / 1000, larger
    return f"{size} bytes" if unit == "bytes" else f"{number:.3g} {unit}"
