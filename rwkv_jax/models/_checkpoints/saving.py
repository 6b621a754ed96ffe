"""Parameters to files."""

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

from jax import Array

from rwkv_jax._operator import check
from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints import files, fla, safetensors, torch_archive
from rwkv_jax.models._checkpoints.layouts import layout_of
from rwkv_jax.models._checkpoints.writing import Stored

Names: TypeAlias = Literal["official", "fla"]

_FORMATS = {".safetensors": safetensors.write, ".pth": torch_archive.write}


def save(path: str | os.PathLike[str], params: Any, *, names: Names = "official") -> None:
    """Write the parameters of a model, which `load` gives back bit for bit.

    One array at a time is on the host. An existing file is replaced when the new one is complete,
    so parameters that were loaded from it can be saved to it.

    Args:
      path: a `.safetensors` file, or a `.pth` file as torch.save writes it; with the names "fla" a
        folder, which is made if need be and gets `model.safetensors` and `config.json`.
      params: the parameters, in either form.
      names: "official", the names and shapes of RWKV-LM's checkpoints; or "fla", those of
        flash-linear-attention and Hugging Face, for RWKV-7.

    Raises:
      ValueError: `path` does not end as it has to, the parameters are those of
        no generation, flash-linear-attention has no such model, or the weights are quantised and
        the file is not `.safetensors` with official names.
      RuntimeError: the parameters are distributed over several processes.
    """
    check.choice("save", "names", names, ("official", "fla"))
    path = Path(path)
    if (path.suffix in _FORMATS) != (names == "official"):
        endings = " or ".join(_FORMATS)
        accepted = f"a file {endings}" if names == "official" else "a folder"
        raise ValueError(f"save: path is {path}; accepted with names={names!r} is {accepted}")
    layout = layout_of("save", _parameters.names(params))
    arrays = _parameters.names(layout.module.unstacked(params))
    stored = dict(_stored(name, x) for name, x in arrays.items())
    scales = [name for name in arrays if name.endswith(".scale")]
    if scales and (path.suffix, names) != (".safetensors", "official"):
        raise ValueError(
            f"save: path is {path}, names={names!r}, and the weights are quantised; accepted is a "
            "file .safetensors with names='official'"
        )
    if names == "fla":
        if layout.name != "RWKV-7":
            raise ValueError(f"save: the model is {layout.name}; names='fla' is for RWKV-7")
        config = json.dumps(fla.config(stored), indent=2)
        path.mkdir(parents=True, exist_ok=True)
        safetensors.write(path / "model.safetensors", fla.from_official(stored))
        (path / files.CONFIG).write_text(config + "\n")
        return
    _FORMATS[path.suffix](
        path,
        {
            name: x._replace(shape=layout.official_shape(name, x.shape))
            for name, x in stored.items()
        },
    )


def _stored(name: str, x: Array) -> tuple[str, Stored]:
    """The official name of a parameter, and the array with the shape of its official layout, but
    for axes of size 1."""
    if name.endswith(".by_input"):
        return f"{name.removesuffix('by_input')}weight", Stored(x, x.shape[::-1], transposed=True)
    return name, Stored(x, x.shape)
