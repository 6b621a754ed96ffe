"""Adapters as folders of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from rwkv_jax import _files
from rwkv_jax._operator import check
from rwkv_jax.finetuning._adapter import Adapter, LowRank, matrices, numbers, shapes
from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints import files, fla, safetensors, writing
from rwkv_jax.models._checkpoints.names import official_name
from rwkv_jax.models._checkpoints.tensors import (
    FLOATS,
    Tensor,
    described,
    listed,
    quoted,
)
from rwkv_jax.models._checkpoints.writing import Stored

Names: TypeAlias = Literal["hf", "fla", "official"]
Sizes: TypeAlias = Mapping[str, tuple[int, int]]

CONFIG, MODEL = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_TENSOR = re.compile(
    r"base_model\.model\.(.+)\.(lora_[AB](?=\.weight)|lora_magnitude_vector)(?:\.weight)?"
)

_ACCEPTED: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others of PEFT change the matrices of the base as well.
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
_ANY = {
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "task_type", "auto_mapping", "inference_mode"),
    *("base_model_name_or_path", "revision", "peft_version", "runtime_config", "eva_config"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying", "use_dora"),
}
"""What a configuration may have that changes nothing, or that is read elsewhere. Everything else is
of another method, and has to be empty or off."""


def _given_name(name: str, names: Names) -> str:
    """The name of a matrix in a module of PyTorch."""
    if names == "fla":
        return fla.fla_name(f"{name}.weight").removesuffix(".weight")
    return f"model.{name}" if names == "hf" else name


def save_adapter(
    path: str | os.PathLike[str],
    adapter: Adapter,
    *,
    names: Names = "hf",
    base: str | os.PathLike[str] | None = None,
) -> None:
    """Write an adapter as PEFT does, which `PeftModel.from_pretrained` and `load_adapter` read.

    Args:
      path: a folder, which is made if need be and gets `adapter_config.json` and
        `adapter_model.safetensors`.
      adapter: the adapter.
      names: whose modules PEFT puts the adapter into: "hf" and "fla", those of the models of RWKV-7
        on Hugging Face (`model.blocks.0.att.key`) and of flash-linear-attention
        (`model.layers.0.attn.k_proj`); or "official", those of RWKV-LM (`blocks.0.att.key`).
      base: the name or the path of the base model, for PEFT.

    Raises:
      ValueError: `path` is no folder, or the matrices have several ranks.
      TypeError: `adapter` is no `Adapter`, or a matrix is no array of floats, or only some have
        magnitudes.
    """
    what = "save_adapter"
    check.choice(what, "names", names, get_args(Names))
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{what}: adapter is a {type(adapter).__name__}; accepted is an Adapter")
    folder = _files.expanded(path)
    if folder.suffix in writing.ENDINGS or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{what}: path is {path}; accepted is a folder")
    ranks = sorted({len(low.lora_A) for low in adapter.matrices.values()})
    if len(ranks) != 1:
        raise ValueError(f"{what}: the matrices have the ranks {ranks}; accepted is one rank")
    given = {name: _given_name(name, names) for name in adapter.matrices}
    parts = {"lora_A": ".weight", "lora_B": ".weight"}
    parts |= {"lora_magnitude_vector": ""} if adapter.dora else {}
    arrays = {
        f"{_PREFIX}{given[name]}.{part}{ending}": getattr(low, part)
        for name, low in adapter.matrices.items()
        for part, ending in parts.items()
    }
    writing.check_arrays(what, arrays)
    config = {
        "peft_type": "LORA",
        "task_type": None if names == "official" else "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else os.fspath(base),
        "r": ranks[0],
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "use_rslora": adapter.rslora,
        "target_modules": sorted(given.values()),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": adapter.dora,
    }
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.write(folder / MODEL, {name: Stored(x, x.shape) for name, x in arrays.items()})
    with writing.replacing(folder / CONFIG) as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


def load_adapter(
    path: str | os.PathLike[str], params: Any, *, dtype: DTypeLike = jnp.float32
) -> Adapter:
    """The adapter in a folder that `save_adapter` or PEFT has written, for the parameters of a
    model. Names of modules are those of `save_adapter`, or others by which `models.load` knows
    matrices.

    Args:
      path: the folder.
      params: the parameters of the base model, in either form, or their shapes.
      dtype: the dtype of A and B. Magnitudes are float32.

    Raises:
      FileNotFoundError: there is no such folder, or one of its files is missing.
      ValueError: a file is damaged; or the adapter is of another method than LoRA and DoRA, or its
        base is changed as well, as by PiSSA; or matrices are missing, of no use or of the wrong
        shape, all of which the message lists; or `path` is a file, such as one of RWKV-PEFT.
      TypeError: `dtype` is not float32, bfloat16 or float16, or `params` are not the parameters of
        a model.
    """
    what = "load_adapter"
    dtype = _parameters.floating(what, dtype)
    folder = _files.expanded(path)
    sizes = matrices(what, params)
    if folder.is_file():
        raise ValueError(
            f"{what}: {path} is a file; accepted is a folder of PEFT. Of a file of RWKV-PEFT "
            "`load_rwkv_peft` reads the adapter, and `rwkv-jax merge MODEL FILE OUT --lora-alpha "
            "ALPHA` writes the model with it"
        )
    config = _config(folder / CONFIG)
    found, others, wrong = by_matrix(_TENSOR, files.read(folder / MODEL), sizes)
    wrong += [
        f"{quoted(given)} is {x.described()}; no matrix of the model has this name"
        for given, x in others.items()
    ]
    check_shapes(str(folder / MODEL), found, sizes, config["r"], wrong, dora=config["use_dora"])
    low_rank = in_order(found, sizes, dtype)
    alpha, dropout = numbers(str(folder / CONFIG), config["lora_alpha"], config["lora_dropout"])
    return Adapter(low_rank, alpha, config["use_rslora"], dropout)


def by_matrix(
    pattern: re.Pattern[str], tensors: Mapping[str, Tensor], sizes: Sizes
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor], list[str]]:
    """Of the tensors of a file: those whose names `pattern` takes apart into that of a matrix and
    that of a field of `LowRank`, by these; all others; and what is wrong with the names."""
    found: dict[str, dict[str, Tensor]] = {}
    others: dict[str, Tensor] = {}
    wrong: list[str] = []
    for given, x in tensors.items():
        parts = pattern.fullmatch(given)
        name = official_name(f"{parts[1]}.weight").removesuffix(".weight") if parts else ""
        if parts is None or name not in sizes:
            others[given] = x
        elif parts[2] in found.setdefault(name, {}):
            wrong.append(f"{quoted(given)} is a second one of {name}")
        else:
            found[name][parts[2]] = x
    return found, others, wrong


def in_order(
    found: Mapping[str, Mapping[str, Tensor]], sizes: Sizes, dtype: DTypeLike
) -> dict[str, LowRank]:
    """The matrices of an adapter in the order of the model, with magnitudes of float32."""

    def array(x: Tensor) -> Array:
        return jnp.asarray(np.array(x.array, np.float32 if x.array.ndim == 1 else dtype))

    return {
        name: LowRank(**{part: array(x) for part, x in found[name].items()})
        for name in sizes
        if name in found
    }


def check_shapes(
    file: str,
    found: Mapping[str, Mapping[str, Tensor]],
    sizes: Sizes,
    rank: int,
    wrong: Sequence[str],
    *,
    dora: bool = False,
) -> None:
    """Raise an error for all tensors of a file that are not as they should be, of which `wrong`
    says some."""
    wrong = [*wrong, *_wrong(found, sizes, rank, dora)]
    if wrong or not found:
        raise ValueError(
            f"{file}: {len(wrong)} tensors are not those of an adapter of rank {rank} for this "
            f"model:{listed(wrong)}"
        )


def _wrong(
    found: Mapping[str, Mapping[str, Tensor]], sizes: Sizes, rank: int, dora: bool
) -> Iterator[str]:
    """What is wrong with the matrices of an adapter."""
    for name, parts in found.items():
        expected = shapes(sizes[name], rank, dora=dora)
        for part in parts.keys() - expected:
            yield f"{part} of {name} is there; expected is none where use_dora is false"
        for part, shape in expected.items():
            if part not in parts:
                yield f"{part} of {name} is missing; expected is {described(shape)}"
                continue
            x = parts[part].array
            if x.shape != shape:
                yield f"{part} of {name} is {described(x.shape)}; expected is {described(shape)}"
            elif x.dtype not in FLOATS.values():
                yield f"{part} of {name} is {x.dtype}; expected is one of {', '.join(FLOATS)}"


def _config(path: Path) -> dict[str, Any]:
    """The configuration of an adapter, with all that is read of it.

    Raises:
      FileNotFoundError, ValueError: as `load_adapter` raises them.
    """
    # The defaults of PEFT.
    config = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "use_rslora": False, "use_dora": False}
    config |= {"peft_type": None, **files.json_object(path)}
    for name, value in config.items():
        if name in _ACCEPTED:
            accepted = _ACCEPTED[name]
            fits = any(type(value) is type(x) and value == x for x in accepted)
        else:
            accepted = ("nothing",)
            fits = name in _ANY or not value
        if not fits:
            raise ValueError(
                f"{path}: {name} is {value!r:.100}; accepted is {' or '.join(map(str, accepted))}, "
                "because the adapter would be of another method, or not all of what was trained"
            )
    check.number(str(path), "r", config["r"], 1)
    for name in ("use_rslora", "use_dora"):
        if not isinstance(config[name], bool):
            raise ValueError(f"{path}: {name} is {config[name]!r:.100}; accepted is true or false")
    return config
