"""Files of the functions that a model may call."""

import json
import os
from typing import Any

from rwkv_jax import _files

_LARGEST_FILE = 2**20


def read_tools(path: str | os.PathLike[str]) -> list[Any]:
    """The functions in a JSON file, which is a list of them.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is no JSON list of at most 1 MiB, or an empty one.
    """
    try:
        found = json.loads(_files.content(_files.expanded(path), _LARGEST_FILE))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: the file is no valid JSON: {error}") from None
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: the file is no JSON list of functions")
    return found
