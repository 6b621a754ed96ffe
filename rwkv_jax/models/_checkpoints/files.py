"""Which files a checkpoint consists of, and their tensors."""

import json
import os
from pathlib import Path
from typing import Any

from rwkv_jax import _files
from rwkv_jax.models._checkpoints import safetensors, torch_archive
from rwkv_jax.models._checkpoints.tensors import (
    FILES,
    MAX_DESCRIPTION,
    TENSORS,
    Allowance,
    Tensor,
    mapped,
    quoted,
)
from rwkv_jax.models._checkpoints.writing import INDEX, PATTERNS


def read(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a file, of the files that an index names, or of a folder.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is damaged, has anything but tensors, or is none of a checkpoint.
    """
    path = _files.expanded(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.name.endswith(INDEX):
        return _of_file(path, Allowance())
    found: dict[str, Tensor] = {}
    allowance = Allowance()
    names = _of_index(path)
    allowance.take(str(path), len(names), FILES)
    for file in names:
        if not (path.parent / file).is_file():
            raise ValueError(f"{path}: there is no file {quoted(file)} beside the index")
        tensors = _of_file(path.parent / file, allowance)
        if not tensors:
            raise ValueError(f"{path}: {quoted(file)} beside the index has no tensors")
        if twice := sorted(found.keys() & tensors.keys()):
            name = twice[0]
            raise ValueError(f"{path}: {quoted(name)} is in {found[name].file} and in {file}")
        found |= tensors
    return found


def _of_file(path: Path, allowance: Allowance) -> dict[str, Tensor]:
    data = mapped(path)
    form = torch_archive if data[:4].tobytes() == torch_archive.MAGIC else safetensors
    return form.read(data, str(path), allowance)


def _in_folder(folder: Path) -> Path:
    for pattern in PATTERNS:
        if not (found := sorted(folder.glob(pattern))):
            continue
        names = ", ".join(quoted(path.name) for path in found[:10])
        if len(found) > 1:
            raise ValueError(f"{folder}: the folder has several checkpoints, {names}; name one")
        # The name is in each message about the file.
        if not found[0].name.isprintable():
            raise ValueError(f"{folder}: the name {names} has characters that cannot be printed")
        return found[0]
    raise ValueError(f"{folder}: the folder has no file {', '.join(PATTERNS)}")


def _of_index(path: Path) -> list[str]:
    """The files that an index names, all of which are beside it."""
    files = json_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: the index has no weight_map")
    Allowance().take(str(path), len(files), TENSORS)
    names = set(files.values()) if all(isinstance(x, str) for x in files.values()) else {""}
    for name in sorted(names):
        if name in ("", ".", "..") or any(x in "/\\" or not x.isprintable() for x in name):
            raise ValueError(
                f"{path}: the index names {quoted(name)}; accepted are names of files beside it"
            )
    return sorted(names)


def json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file has none, is too large or is no regular one.
    """
    content = _files.content(path, MAX_DESCRIPTION)
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: the file is no valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: the file is no JSON object")
    return found
