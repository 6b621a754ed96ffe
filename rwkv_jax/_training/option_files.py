"""Files of options, in TOML."""

import argparse
import difflib
import tomllib
from collections.abc import Sequence
from typing import Any

from rwkv_jax import _files

OPTION = "--options"

REPEATED = {"data"}
"""Options of which each value counts, not the last one alone."""


def with_file(parser: argparse.ArgumentParser, argv: Sequence[str]) -> list[str]:
    """The command line with the options of the file that --options names in front: those that the
    command line does not have itself. The program exits where the file has what is no option."""
    only = argparse.ArgumentParser(parser.prog, argparse.SUPPRESS, add_help=False)
    only.add_argument(OPTION)
    if (file := only.parse_known_args(argv)[0].options) is None:
        return list(argv)
    try:
        values = tomllib.loads(_files.expanded(file).read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{OPTION} {file}: {error}")
    defaults = vars(parser.parse_args([]))
    unset = _Unset()
    given = vars(
        parser.parse_known_args(argv, argparse.Namespace(**dict.fromkeys(defaults, unset)))[0]
    )
    words = []
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in defaults or f"--{name}" == OPTION:
            near = difflib.get_close_matches(name, defaults, 1, 0.0)
            parser.error(
                f"{OPTION} {file} has {key!r}, which is no option; the closest is {near[0]!r}"
            )
        if given[name] is unset:
            words += _words(parser, f"{OPTION} {file}: {key}", name, value, defaults[name])
    return [*words, *argv]


class _Unset(list[Any]):
    """In place of the value of an option that is not given. One that appends makes a copy of it."""


def _words(
    parser: argparse.ArgumentParser, where: str, name: str, value: Any, default: Any
) -> list[str]:
    """An option as on the command line. One that is off by default takes no value there. A list is
    that of an option which may be repeated, or has commas between its parts."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool) != isinstance(default, bool):
        accepted = "true or false" if isinstance(default, bool) else "a text or a number"
        parser.error(f"{where} is {value!r}; accepted is {accepted}")
    if isinstance(value, bool):
        return [flag] if value else []
    values = value if isinstance(value, list) else [value]
    if any(not isinstance(x, str | int | float) or isinstance(x, bool) for x in values):
        parser.error(f"{where} is {value!r}; accepted is a text or a number, or a list of them")
    if name not in REPEATED:
        values = [",".join(map(str, values))]
    return [f"{flag}={x}" for x in values]
