"""RWKV-4 to 6 on Hugging Face: names and configuration. All arrays are as in official files.

Source: `RwkvForCausalLM` of transformers, which is RWKV-4, and its counterparts for RWKV-5 and 6.
"""

import re

from rwkv_jax.models._checkpoints.tensors import Tensor

PREFIXES = ("rwkv.",)
"""The beginning of all names but that of the head."""

CONFIG = {
    "model_type": ("rwkv", "rwkv5", "rwkv6"),
    "layer_norm_epsilon": (1e-5,),
    "head_size_divisor": (8,),
}
"""What `config.json` may have that the shapes of tensors do not tell."""

_WORDS = {
    "embeddings": "emb",
    "pre_ln": "ln0",
    "attention": "att",
    "feed_forward": "ffn",
    "time_mix_key": "time_mix_k",
    "time_mix_value": "time_mix_v",
    "time_mix_receptance": "time_mix_r",
    "time_mix_gate": "time_mix_g",
}


def to_official(given: str, x: Tensor) -> dict[str, Tensor]:
    """The tensor by its official name."""
    words = re.sub(r"^rwkv\.", "", given).split(".")
    return {".".join(_WORDS.get(word, word) for word in words): x}
