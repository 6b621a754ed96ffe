"""What a `config.json` beside tensors says: the formula, the sizes, and which tensors it stands
for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rwkv_jax.models._checkpoints import files
from rwkv_jax.models._checkpoints.tensors import Tensor
from rwkv_jax.models._checkpoints.writing import Arrays

FILE = "config.json"

_RANKS = {"w": "decay", "a": "a", "v": "v", "g": "gate"}
_FORMULA = {
    "RWKV-7": {
        "model_type": ("rwkv7", "rwkv"),
        "architecture_version": ("rwkv7",),
        "hidden_act": ("sqrelu",),
        "norm_eps": (1e-5,),
        "layer_norm_epsilon": (1e-5,),
        "group_norm_epsilon": (64e-5,),
        "deep_embedding": (False,),
        "norm_first": (True,),
        "norm_bias": (True,),
    },
}
_EARLIER = {
    "model_type": ("rwkv", "rwkv5", "rwkv6"),
    "layer_norm_epsilon": (1e-5,),
    "head_size_divisor": (8,),
}
"""What a configuration may have that the shapes of tensors do not tell, by generation."""

_OF_RWKV = {*_FORMULA["RWKV-7"]["model_type"], *_EARLIER["model_type"]}


class Description(NamedTuple):
    """A configuration.

    Attributes:
      path: its file.
      content: the object in it, empty if there is none.
    """

    path: Path
    content: Mapping[str, Any] = {}

    @property
    def fused(self) -> bool:
        """Whether the normalisation of the embedding is part of the embedding, so that there are no
        tensors of `ln0`."""
        return self.content.get("embedding_layer_norm_fused") is True

    def with_head(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors with the embedding also as the head, if it is tied to it and missing."""
        tied = self.content.get("tie_word_embeddings") is True
        if tied and "head.weight" not in tensors and "emb.weight" in tensors:
            return tensors | {"head.weight": tensors["emb.weight"]}
        return tensors

    def check(self, generation: str, sizes: Mapping[str, int], tensors: Mapping[str, Any]) -> None:
        """Check it against a generation and its sizes, the arguments of `Config`, and the shapes of
        tensors by official names.

        Raises:
          ValueError: it asks for another formula, or has other sizes.
        """
        self._check_formula(generation)
        told = {"num_hidden_layers": sizes["num_layers"]}
        told |= {name: sizes[name] for name in ("hidden_size", "vocab_size")}
        if generation == "RWKV-7":
            told |= _sizes_of_rwkv7(sizes, tensors)
            if self.content.get("head_dim") is not None:
                # flash-linear-attention then counts the heads itself.
                del told["num_heads"]
        content = {**self.content} | self._sizes_of_fla(sizes["hidden_size"])
        wrong = [
            f"{name} is {content[name]!r:.100}, and the tensors have {size}"
            for name, size in told.items()
            if content.get(name) is not None
            and (type(content[name]) is not int or content[name] != size)
        ]
        if wrong:
            raise ValueError(f"{self.path}: {'; '.join(wrong)}")

    def _sizes_of_fla(self, width: int) -> dict[str, Any]:
        """What flash-linear-attention computes: the size of the channel mixing where there is none,
        and one size of the values for layers that all have it."""
        found: dict[str, Any] = {}
        ratio = self.content.get("hidden_ratio")
        computed = self.content.get("intermediate_size") is None
        if computed and isinstance(ratio, int | float) and 0 < ratio < 2**31:
            found["intermediate_size"] = -(-int(width * ratio) // 32) * 32
        values = self.content.get("value_dim")
        if isinstance(values, list) and len({*map(repr, values)}) == 1:
            found["value_dim"] = values[0]
        return found

    def _check_formula(self, generation: str) -> None:
        for name, values in _FORMULA.get(generation, _EARLIER).items():
            if name in self.content and self.content[name] not in values:
                raise ValueError(
                    f"{self.path}: {name} is {self.content[name]!r:.100}; accepted is "
                    + " or ".join(map(repr, values))
                )
        if generation != "RWKV-7":
            # RWKV-4 there rescales as it runs, and files have the original weights.
            return
        attention = self.content.get("attn")
        if attention and (not isinstance(attention, dict) or attention.get("layers") != []):
            raise ValueError(
                f"{self.path}: attn is {attention!r:.100}, which makes some layers softmax "
                "attention; accepted is a model whose layers are all RWKV-7"
            )
        rescale = self.content.get("rescale_every", 0)
        if type(rescale) is not int or rescale > 0:
            raise ValueError(
                f"{self.path}: rescale_every is {rescale!r:.100}, and the weights may have been "
                "divided by powers of 2; accepted is 0, with the original weights"
            )


def beside(path: Path) -> Description:
    """The configuration in a folder or beside a file; an empty one if there is none.

    Raises:
      ValueError: the file has no JSON object.
    """
    path = (path if path.is_dir() else path.parent) / FILE
    return Description(path, files.json_object(path) if path.exists() else {})


def in_folder_of(path: Path) -> Description:
    """The configuration in a folder with official names, which need none; an empty one where the
    file is not one of RWKV."""
    try:
        found = beside(path) if path.is_dir() else Description(path)
    except ValueError:
        return Description(path)
    kind = found.content.get("model_type")
    return found if isinstance(kind, str) and kind in _OF_RWKV else Description(path)


def _sizes_of_rwkv7(sizes: Mapping[str, int], shapes: Mapping[str, Any]) -> dict[str, int]:
    """The other sizes of RWKV-7 by the names of a configuration."""
    head_size = sizes["head_size"]
    heads = sizes["hidden_size"] // head_size
    told = {"head_size": head_size, "head_dim": head_size}
    told |= {"num_attention_heads": heads, "num_heads": heads, "value_dim": sizes["hidden_size"]}
    hidden = shapes.get("blocks.0.ffn.key.weight", ())
    told |= {"intermediate_size": hidden[0]} if hidden else {}
    # The first block has no share of the value, or one that is not used.
    for layer in range(min(sizes["num_layers"], 2)):
        for map_, word in _RANKS.items():
            shape = shapes.get(f"blocks.{layer}.att.{map_}1", ())
            if len(shape) == 2 and (layer, map_) != (0, "v"):
                told[f"{word}_low_rank_dim"] = shape[1]
    return told


def sizes(whose: str, arrays: Arrays) -> dict[str, Any]:
    """What all configurations of RWKV-7 have, for arrays with official names.

    Raises:
      ValueError: the rank of a map is not the same in all layers.
    """
    vocabulary, width = arrays["emb.weight"].shape
    ranks = {}
    for map_, word in _RANKS.items():
        found = {x.shape[1] for name, x in arrays.items() if name.endswith(f".att.{map_}1")}
        if len(found) > 1:
            raise ValueError(
                f"save: the ranks of {map_}1 are {sorted(found)}; {whose} has one for all layers"
            )
        ranks[f"{word}_low_rank_dim"] = found.pop() if found else 32
    return {
        "model_type": "rwkv7",
        "dtype": arrays["emb.weight"].dtype,
        "torch_dtype": arrays["emb.weight"].dtype,
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": arrays["blocks.0.ffn.key.weight"].shape[0],
        "num_hidden_layers": sum(name.endswith(".att.r_k") for name in arrays),
        **ranks,
        "tie_word_embeddings": False,
    }
