"""Tokenizers of `tokenizer.json` files of Hugging Face, whose tokens stand for bytes."""

import json
from pathlib import Path

from rwkv_jax.tokenizers._tokenizer import Tokenizer

_END_OF_TEXT = "<|endoftext|>"


def hugging_face(name: str, path: Path, vocabulary: int | None) -> Tokenizer:
    """The tokenizer in a file, which the package `tokenizers` runs.

    Special tokens have no text, and text that looks like one is text.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the package `tokenizers` is not installed.
      ValueError: the file has no tokenizer, or one whose tokens do not stand for bytes, or tokens
        that are not below `vocabulary`.
    """
    content = path.read_bytes()
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{path} needs the package tokenizers: pip install 'rwkv-jax[text]'"
        ) from error
    try:
        kind = (json.loads(content).get("decoder") or {}).get("type")
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # The package raises nothing more special.
    except Exception as error:
        raise ValueError(f"{path}: the file has no tokenizer: {error}") from None
    if kind != "ByteLevel":
        raise ValueError(f"{path}: the decoder is {kind}; accepted is ByteLevel")
    tokenizer.encode_special_tokens = True
    alphabet = _alphabet()
    added = tokenizer.get_added_tokens_decoder()
    pieces = {
        token: bytes(alphabet[x] for x in text) if alphabet.keys() >= {*text} else text.encode()
        for text, token in tokenizer.get_vocab(with_added_tokens=False).items()
    }
    pieces |= {token: b"" if x.special else x.content.encode() for token, x in added.items()}
    return Tokenizer(
        name,
        max(pieces, default=-1) + 1 if vocabulary is None else vocabulary,
        pieces,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        next(
            (token for token, x in added.items() if x.special and x.content == _END_OF_TEXT), None
        ),
    )


def _alphabet() -> dict[str, int]:
    """The bytes by the characters that files have for them. Those of Latin-1 that are visible stand
    for themselves, and all others, in order, have the characters from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(x): x for x in visible} | {chr(256 + i): x for i, x in enumerate(others)}
