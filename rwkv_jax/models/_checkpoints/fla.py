"""RWKV-7 in flash-linear-attention (FLA): names, layout and configuration.

Linear maps of low rank are transposed in FLA; all other arrays are the same.
"""

import re
from typing import Any

from rwkv_jax.models._checkpoints import config
from rwkv_jax.models._checkpoints.tensors import Tensor
from rwkv_jax.models._checkpoints.writing import Arrays, Stored

_HEAD_SIZE = 64
"""The head size for which FLA has the formula of RWKV-LM. The eps of its `g_norm` is the head size
times `norm_eps`, and that of RWKV-LM is 64e-5 for all head sizes."""

_TOP = {
    "emb.weight": "model.embeddings.weight",
    "head.weight": "lm_head.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
}
_PARTS = {"att": "attn", "ffn": "ffn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
_ATT = {
    "receptance": "r_proj",
    "key": "k_proj",
    "value": "v_proj",
    "output": "o_proj",
    "ln_x": "g_norm",
}
_LOW_RANK = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}
_OFFICIAL_LOW_RANK = {fla: number for number, fla in _LOW_RANK.items()}

_BLOCK = re.compile(r"blocks\.(\d+)\.(att|ffn|ln[012])\.(.+)")
_FLA_BLOCK = re.compile(r"layers\.(\d+)\.(attn|ffn|pre_norm|attn_norm|ffn_norm)\.(.+)")
_MATRIX = re.compile(r"([wavg])([012])")
_FLA_MATRIX = re.compile(r"([wavg])_lora\.lora\.(2\.bias|0\.weight|2\.weight)")
# The first version had the six vectors of the token shift in one array.
_MIXES = "x_x"
_MIX_NAMES = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g")


def fla_name(name: str) -> str:
    """The name in FLA of an official name."""
    found = _BLOCK.fullmatch(name)
    if found is None:
        return _TOP[name]
    layer, part, rest = found.groups()
    if part == "att":
        matrix = _MATRIX.fullmatch(rest)
        first, dot, kind = rest.partition(".")
        if matrix:
            rest = f"{matrix[1]}_lora.lora.{_LOW_RANK[matrix[2]]}"
        else:
            rest = _ATT.get(first, first) + dot + kind
    return f"model.layers.{layer}.{_PARTS[part]}.{rest}"


def official_name(name: str) -> str | None:
    """The official name of a name within a block in FLA, which begins with `layers.`; None if it is
    no such name."""
    found = _FLA_BLOCK.fullmatch(name)
    if found is None:
        return None
    layer, fla_part, rest = found.groups()
    part = next(part for part, word in _PARTS.items() if word == fla_part)
    if part == "att":
        matrix = _FLA_MATRIX.fullmatch(rest)
        first, dot, kind = rest.partition(".")
        if matrix:
            rest = matrix[1] + _OFFICIAL_LOW_RANK[matrix[2]]
        else:
            rest = next((x for x, word in _ATT.items() if word == first), first) + dot + kind
    return f"blocks.{layer}.{part}.{rest}"


def is_transposed(official: str) -> bool:
    """Whether an array is transposed in FLA."""
    return re.fullmatch(r"blocks\.\d+\.att\.[wavg][12]", official) is not None


def check_head_size(what: str, shape: tuple[int, ...]) -> None:
    """Raise an error that begins with `what` if FLA has another formula than RWKV-LM for a model
    whose `r_k` has this shape."""
    if shape[-1:] != (_HEAD_SIZE,):
        raise ValueError(
            f"{what}; accepted is [H, {_HEAD_SIZE}], because flash-linear-attention normalises "
            "with another eps than RWKV-LM where the head size is another one"
        )


def to_official(what: str, name: str, x: Tensor) -> dict[str, Tensor]:
    """The official tensors that a tensor of FLA holds, by their names. `name` is the official name
    of the whole tensor.

    Raises:
      ValueError: FLA has another formula for this head size. The message begins with `what`.
    """
    if name.endswith(".att.r_k"):
        check_head_size(f"{what} is {x.described()}", x.array.shape)
    if name.endswith(f".{_MIXES}") and x.array.ndim == 2 and len(x.array) == len(_MIX_NAMES):
        prefix = name.removesuffix(_MIXES)
        return {prefix + mix: Tensor(x.array[i], x.file) for i, mix in enumerate(_MIX_NAMES)}
    return {name: Tensor(x.array.T, x.file) if is_transposed(name) else x}


def from_official(arrays: Arrays) -> dict[str, Stored]:
    """The arrays by their names in FLA, in its layout."""
    found = {}
    for name, x in arrays.items():
        shape, transposed = x.shape, x.transposed
        if ".att.x_" in name:
            shape = (1, 1, *shape)
        elif is_transposed(name):
            shape, transposed = shape[::-1], not transposed
        found[fla_name(name)] = Stored(x.array, shape, transposed)
    return found


def description(arrays: Arrays) -> dict[str, Any]:
    """The content of `config.json` for arrays with official names.

    Raises:
      ValueError: the rank of a map is not the same in all layers.
    """
    _, head_size = arrays["blocks.0.att.r_k"].shape
    width, hidden = (arrays[x].shape[0] for x in ("ln_out.weight", "blocks.0.ffn.key.weight"))
    return {
        "architectures": ["RWKV7ForCausalLM"],
        **config.sizes("flash-linear-attention", arrays),
        "hidden_ratio": hidden / width,
        "num_heads": width // head_size,
        "head_dim": head_size,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
    }
