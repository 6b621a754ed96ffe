"""The models of Hugging Face: names and configuration. All arrays are as in official files.

RWKV-7 has its official names there, some of which the models of a converter change. RWKV-4 to 6
have other words in them.

Source: `Rwkv7ForCausalLM` and `RwkvForCausalLM` of transformers-rwkv (2026) and, for RWKV-4,
`RwkvForCausalLM` of transformers, with its counterparts for RWKV-5 and 6.
"""

from typing import Any

from rwkv_jax.models._checkpoints import config
from rwkv_jax.models._checkpoints.writing import Arrays, Stored

_EARLIER = {
    "pre_ln": "ln0",
    "attention": "att",
    "feed_forward": "ffn",
    "time_mix_key": "time_mix_k",
    "time_mix_value": "time_mix_v",
    "time_mix_receptance": "time_mix_r",
    "time_mix_gate": "time_mix_g",
}
_RWKV_7 = {
    "layers": "blocks",
    "embedding_norm": "blocks.0.ln0",
    "input_layernorm": "ln1",
    "post_attention_layernorm": "ln2",
    "linear_attn": "att",
    "mlp": "ffn",
    "r_proj": "receptance",
    "k_proj": "key",
    "v_proj": "value",
    "o_proj": "output",
    "g_norm": "ln_x",
}
_TOP = {"embeddings": "emb", "embed_tokens": "emb", "norm": "ln_out", "lm_head": "head"}
_WORDS = _EARLIER | _RWKV_7 | _TOP


def official_name(name: str) -> str:
    """The official name of a name of any of these models, which may be the official one."""
    return ".".join(_WORDS.get(word, word) for word in name.split("."))


def from_official(arrays: Arrays) -> dict[str, Stored]:
    """Arrays with official names and shapes by the names of `Rwkv7ForCausalLM`."""
    return {name if name == "head.weight" else f"model.{name}": x for name, x in arrays.items()}


def description(arrays: Arrays) -> dict[str, Any]:
    """The content of `config.json` for arrays with official names.

    Raises:
      ValueError: the rank of a map is not the same in all layers.
    """
    heads, head_size = arrays["blocks.0.att.r_k"].shape
    return {
        "architectures": ["Rwkv7ForCausalLM"],
        **config.sizes("the layout of Hugging Face", arrays),
        "num_attention_heads": heads,
        "head_size": head_size,
        "layer_norm_epsilon": 1e-5,
        "group_norm_epsilon": 64e-5,
        "rescale_every": 0,
        "embedding_layer_norm_fused": "blocks.0.ln0.weight" not in arrays,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
