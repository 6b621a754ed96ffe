"""Parameters to files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from jax import Array

from rwkv_jax import _files
from rwkv_jax._operator import check
from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints import (
    config,
    files,
    fla,
    hugging_face,
    safetensors,
    text_files,
    torch_archive,
    writing,
)
from rwkv_jax.models._checkpoints.layouts import layout_of
from rwkv_jax.models._checkpoints.names import is_of_fla
from rwkv_jax.models._checkpoints.tensors import described
from rwkv_jax.models._checkpoints.writing import Arrays, Stored
from rwkv_jax.models._stacking import unstack
from rwkv_jax.models._trees import BlockState, Params, first_block, has_tables

Names: TypeAlias = Literal["official", "fla", "hf"]

_FORMATS = {".safetensors": safetensors.write, ".pth": torch_archive.write}


def save(
    path: str | os.PathLike[str],
    params: Any,
    *,
    names: Names = "official",
    source: str | os.PathLike[str] | None = None,
) -> None:
    """Write the parameters of a model, which `load` gives back bit for bit.

    One array at a time is on the host. An existing file is replaced when the new one is complete,
    so parameters that were loaded from it can be saved to it.

    Args:
      path: a `.safetensors` file, or a `.pth` file as torch.save writes it; with the names "fla" or
        "hf" a folder, which is made if need be and gets `model.safetensors` and `config.json`.
      params: the parameters, in either form; also `params` of a model of `rwkv_jax.nn`.
      names: "official", the names and shapes of RWKV-LM's checkpoints; or, for RWKV-7, "fla", those
        of flash-linear-attention, or "hf", those of `Rwkv7ForCausalLM` on Hugging Face.
      source: where the parameters are from. If it and `path` are folders, its files of the
        tokenizer and of conversations are copied, such as `tokenizer.json` and
        `chat_template.jinja`. With the names "hf" a folder without a tokenizer gets that of the
        World models for 65536 tokens, if it is installed (`rwkv-jax[text]`).

    Raises:
      TypeError: `params` are not the parameters of a model, or one is no array of a dtype that
        `load` reads.
      ValueError: `path` does not end as it has to, which for quantised weights is as
        `.safetensors`, or is a folder with another checkpoint; or there is no such model by these
        names; or the model has more tensors than `load` reads.
      RuntimeError: the parameters are distributed over several processes.
    """
    check.choice("save", "names", names, get_args(Names))
    path = _files.expanded(path)
    params = _parameters.arrays(params)
    if not isinstance(params, Params):
        raise TypeError(
            f"save: params is a {type(params).__name__}; accepted is a Params, which a model of "
            "rwkv_jax.nn has as its params"
        )
    endings = endings_for("save: names", params, names)
    writing.check_target("save: path", path, endings)
    given = _parameters.names(params)
    if of_adapter := [name for name in given if name.endswith(".lora_A")]:
        raise ValueError(
            f"save: {of_adapter[0]} is of an adapter; accepted are parameters without one, as "
            "rwkv_jax.finetuning.merge gives them"
        )
    layout = layout_of("save", given)
    writing.check_arrays("save", given)
    arrays = _parameters.names(layout.module.unstacked(params))
    stored = dict(_stored(name, x) for name, x in arrays.items())
    official = {
        name: x._replace(shape=layout.official_shape(name, x.shape)) for name, x in stored.items()
    }
    if names == "official":
        _FORMATS[path.suffix](path, official)
        return
    if names == "fla":
        _write_folder(path, fla.description(stored), fla.from_official(stored))
    else:
        described = hugging_face.description(stored)
        _write_folder(path, described, hugging_face.from_official(official))
    if source is not None:
        text_files.copy(_files.expanded(source), path)
    if names == "hf":
        text_files.add_tokenizer(path, len(params.emb.weight))


def _write_folder(folder: Path, described: Mapping[str, Any], arrays: Arrays) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / writing.IN_FOLDER, arrays)
    with writing.replacing(folder / config.FILE) as file:
        file.write((json.dumps(described, indent=2) + "\n").encode())


def needs_folder(params: Params) -> bool:
    """Whether no file can have parameters, or their shapes: the embedding is normalised already."""
    return first_block(params).ln0 is None


def names_of_folder(source: str | os.PathLike[str], params: Params) -> Names | None:
    """The names by which `save` can write parameters, or their shapes, to a folder: those of the
    checkpoint `source`, which they are made of, or those of Hugging Face. None if it cannot."""
    names = "fla" if any(map(is_of_fla, files.read(source))) else "hf"
    description = fla.description if names == "fla" else hugging_face.description
    try:
        endings_for("names", params, names)
        description(dict(_stored(name, x) for name, x in _parameters.names(params).items()))
    except ValueError:
        return None
    return names


def endings_for(
    what: str, params: Params, names: Names, *, quantised: bool = False
) -> tuple[str, ...]:
    """The endings of the files to which `save` can write parameters, or their shapes, by these
    names; none for a folder. They may become `quantised` before.

    Raises:
      ValueError: there is no such model by these names. The message begins with `what`.
    """
    quantised |= params.head.scale is not None
    if names != "hf" and needs_folder(params):
        raise ValueError(
            f"{what} is {names}, and the embedding is normalised already, so that there is no ln0; "
            "accepted is hf"
        )
    if names == "official":
        return (".safetensors",) if quantised else writing.ENDINGS
    layout = layout_of(what, _parameters.names(params))
    if quantised or has_tables(params) or layout.name != "RWKV-7":
        model = layout.name + (" with quantised weights" if quantised else "")
        model += " with DeepEmbed" if has_tables(params) else ""
        raise ValueError(f"{what} is {names}; accepted for {model} is official")
    if names == "fla":
        shape = first_block(params).att.r_k.shape[-2:]
        fla.check_head_size(f"{what} is fla and r_k is {described(shape)}", shape)
    return ()


def save_state(path: str | os.PathLike[str], state: Any) -> None:
    """Write the states of the operators of a model as a file of a tuned state, which `load_state`
    and other programs read: `blocks.0.att.time_state` [H, V, K] and so on.

    Such a file is what a model starts from, so that it has no inputs of token shifts: those of
    `state` are left out. `generation.save` keeps all of a state.

    Args:
      path: a `.safetensors` file, or a `.pth` file as torch.save writes it.
      state: a state of one row, in either form, of RWKV-5 to 7.

    Raises:
      TypeError: `state` is no state of a model, or has no arrays.
      ValueError: `path` does not end as it has to, `state` has several rows, or it is of RWKV-4.
      RuntimeError: the state is distributed over several processes.
    """
    path = _files.expanded(path)
    writing.check_target("save_state: path", path, writing.ENDINGS)
    blocks = unstack(state) if isinstance(state, tuple) else ()
    if not blocks or not all(isinstance(block, BlockState) for block in blocks):
        raise TypeError(f"save_state: state is a {type(state).__name__}; accepted is a State")
    arrays = {f"blocks.{i}.att.time_state": block.att.wkv for i, block in enumerate(blocks)}
    if not all(getattr(x, "ndim", 0) == 4 for x in arrays.values()):
        raise ValueError("save_state: state is of RWKV-4; accepted is one with a matrix a head")
    writing.check_arrays("save_state", arrays)
    if rows := {len(x) for x in arrays.values()} - {1}:
        raise ValueError(f"save_state: state has {rows.pop()} rows; accepted is one")
    save_tuned(path, {name: x[0] for name, x in arrays.items()})


def save_tuned(path: Path, states: Mapping[str, Array]) -> None:
    """Write tuned states by their official names, [H, V, K] each."""
    _FORMATS[path.suffix](path, {name: Stored(x, x.shape) for name, x in states.items()})


def _stored(name: str, x: Any) -> tuple[str, Stored]:
    """The official name of a parameter, and the array with the shape of its official layout, but
    for axes of size 1."""
    if name.endswith(".by_input"):
        return f"{name.removesuffix('by_input')}weight", Stored(x, x.shape[::-1], transposed=True)
    return name, Stored(x, x.shape)
