"""The tokenizer of the World models as files of Hugging Face, which its programs read."""

import json
from pathlib import Path

from rwkv_jax.tokenizers._hugging_face import alphabet_of_bytes
from rwkv_jax.tokenizers._tokenizer import END_OF_TEXT
from rwkv_jax.tokenizers._word_level import description
from rwkv_jax.tokenizers._world import END_OF_TEXT as END
from rwkv_jax.tokenizers._world import published, read


def world_files(vocabulary: Path | None = None) -> dict[str, bytes]:
    """The content of `tokenizer.json`, of which the package `tokenizers` makes the same tokens, and
    of the `tokenizer_config.json` that transformers reads beside it.

    Args:
      vocabulary: the file of the vocabulary; the published one if None.

    Raises:
      ImportError: no package that has the published vocabulary is installed.
    """
    end = END_OF_TEXT[0]
    made = description(read(vocabulary or published()), alphabet_of_bytes(), (end, END))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "split_special_tokens": True}
    config |= {f"{name}_token": end for name in ("bos", "eos", "pad", "unk")}
    config |= {"clean_up_tokenization_spaces": False}
    found = {"tokenizer.json": made, "tokenizer_config.json": config}
    return {name: json.dumps(x, ensure_ascii=False).encode() for name, x in found.items()}
