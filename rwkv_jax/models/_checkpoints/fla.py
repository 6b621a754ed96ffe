"""RWKV-7 in flash-linear-attention (FLA) and on Hugging Face: names, layout and configuration.

Linear maps of low rank are transposed in FLA; all other arrays are the same.
"""

import re
from typing import Any

from rwkv_jax.models._checkpoints.tensors import Tensor, quoted
from rwkv_jax.models._checkpoints.writing import Arrays, Stored

PREFIXES = ("model.", "lm_head.")
"""The beginnings of names that only FLA has."""

_HEAD_SIZE = 64
"""The head size for which FLA has the formula of RWKV-LM. The eps of its `g_norm` is the head size
times `norm_eps`, and that of RWKV-LM is 64e-5 for all head sizes."""

CONFIG = {"model_type": ("rwkv7",), "hidden_act": ("sqrelu",), "norm_eps": (1e-5,)}
"""What `config.json` may have that the shapes of tensors do not tell."""

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
_FLA_BLOCK = re.compile(r"model\.layers\.(\d+)\.(attn|ffn|pre_norm|attn_norm|ffn_norm)\.(.+)")
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


def official_name(name: str) -> str:
    """The official name of a name in FLA; the name itself, if it is none of RWKV-7."""
    for official, fla in _TOP.items():
        if name == fla:
            return official
    found = _FLA_BLOCK.fullmatch(name)
    if found is None:
        return name
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


def to_official(given: str, x: Tensor) -> dict[str, Tensor]:
    """The official tensors that a tensor of FLA holds, by their names.

    Raises:
      ValueError: FLA has another formula for this head size.
    """
    name = official_name(given)
    if name.endswith(".att.r_k"):
        check_head_size(f"{x.file}: {quoted(given)} is {x.described()}", x.array.shape)
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


def config(arrays: Arrays) -> dict[str, Any]:
    """The content of `config.json` for arrays with official names.

    Raises:
      ValueError: the rank of a map is not the same in all layers.
    """
    vocabulary, width = arrays["emb.weight"].array.shape
    hidden = len(arrays["blocks.0.ffn.key.weight"].array)
    heads, head_size = arrays["blocks.0.att.r_k"].array.shape
    ranks = {}
    for map_, word in {"w": "decay", "a": "a", "v": "v", "g": "gate"}.items():
        found = {x.array.shape[1] for name, x in arrays.items() if name.endswith(f".att.{map_}1")}
        if len(found) > 1:
            raise ValueError(
                f"save: the ranks of {map_}1 are {sorted(found)}; flash-linear-attention has one "
                "for all layers"
            )
        ranks[f"{word}_low_rank_dim"] = found.pop() if found else 32
    return {
        "architectures": ["RWKV7ForCausalLM"],
        "model_type": "rwkv7",
        "dtype": arrays["emb.weight"].dtype,
        "torch_dtype": arrays["emb.weight"].dtype,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": hidden,
        "hidden_ratio": hidden / width,
        "num_hidden_layers": sum(name.endswith(".att.r_k") for name in arrays),
        "num_heads": heads,
        "head_dim": head_size,
        **ranks,
        "hidden_act": "sqrelu",
        "norm_first": True,
        "norm_bias": True,
        "norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
