"""Tokenizers of `tokenizer.json` files of Hugging Face, whose tokens stand for bytes."""

import json
import unicodedata
from pathlib import Path
from typing import Any

from rwkv_jax import _files
from rwkv_jax.tokenizers._tokenizer import END_OF_TEXT, Tokenizer
from rwkv_jax.tokenizers._word_level import longest_words
from rwkv_jax.tokenizers._world import encoder

_LARGEST_FILE = 2**25
"""The most bytes of a file, all of which the package parses before it can be refused."""

_CHARACTERS = (*range(0x800), *range(0x800, 0xD800, 0x800), *range(0x10000, 0x110000, 0x10000))
_PROBES = ("".join(map(chr, _CHARACTERS)), " \n ")
"""Texts that a tokenizer has to give back, with all bytes of UTF-8, upper case and accents. One has
no space in front, and one is whitespace alone."""


def hugging_face(name: str, path: Path, vocabulary: int | None) -> Tokenizer:
    """The tokenizer in a file, which the package `tokenizers` runs.

    Special tokens have no text, and text that looks like one is text. What a file says of
    truncation, of padding and of random merges (`dropout`) is for training with batches of it, and
    is ignored: all of a text is encoded, always in the same way.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the package `tokenizers` is not installed.
      ValueError: the file is larger than `_LARGEST_FILE` or no regular one, it has no tokenizer, or
        one whose tokens do not stand for bytes or that changes text, or tokens that are not below
        `vocabulary`.
    """
    content = _files.content(path, _LARGEST_FILE)
    description = _json_object(content)
    alphabet = alphabet_of_bytes()
    if words := longest_words(description, alphabet):
        size = max(words) + 1 if vocabulary is None else vocabulary
        ends = map(description["model"]["vocab"].get, END_OF_TEXT)
        end = next((x for x in ends if type(x) is int), None)
        return Tokenizer(name, size, words, encoder(words), end)
    if description.get("model", {}).get("type") == "RwkvTrie":
        raise ValueError(
            f"{path}: the tokenizer is a RwkvTrie, which the package tokenizers does not have; "
            "accepted for the World models is the tokenizer 'world'"
        )
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"{path} needs the package tokenizers: pip install 'rwkv-jax[text]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # The package raises nothing more special.
    except Exception as error:
        raise ValueError(f"{path}: the file has no tokenizer: {error}") from None
    if not isinstance(tokenizer.decoder, tokenizers.decoders.ByteLevel):
        kind = tokenizer.decoder and type(tokenizer.decoder).__name__
        raise ValueError(f"{path}: the decoder is {kind}; accepted is ByteLevel")
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None) is not None:
        tokenizer.model.dropout = None
    added = tokenizer.get_added_tokens_decoder()
    pieces = {
        token: bytes(alphabet[x] for x in text) if alphabet.keys() >= {*text} else text.encode()
        for text, token in tokenizer.get_vocab(with_added_tokens=False).items()
    }
    pieces |= {token: b"" if x.special else x.content.encode() for token, x in added.items()}

    def encode(text: str) -> list[int]:
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        _check(path, text, b"".join(map(pieces.__getitem__, tokens)).decode(errors="replace"))
        return tokens

    # A file may lack tokens of some bytes, whose texts are refused when they are encoded.
    known = set(b"".join(pieces.values()))
    for probe in _PROBES:
        encode("".join(x for x in probe if known.issuperset(x.encode())))
    return Tokenizer(
        name,
        max(pieces, default=-1) + 1 if vocabulary is None else vocabulary,
        pieces,
        encode,
        next((token for token, x in added.items() if x.special and x.content in END_OF_TEXT), None),
    )


def _json_object(content: bytes) -> dict[str, Any]:
    """The object in a file; an empty one if there is none, which the package refuses."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("model"), dict) else {}


def _check(path: Path, text: str, decoded: str) -> None:
    """Refuse tokens that stand for another text than the one that was encoded. Many tokenizers
    first compose its characters as in the normal form NFC of Unicode, which is the same text."""
    if text == decoded:
        return
    text, decoded = (unicodedata.normalize("NFC", x) for x in (text, decoded))
    if text != decoded:
        pairs = enumerate(zip(text, decoded, strict=False))
        start = next((i for i, (x, y) in pairs if x != y), min(len(text), len(decoded)))
        raise ValueError(
            f"{path}: the tokenizer makes {decoded[start : start + 20]!r} of the text "
            f"{text[start : start + 20]!r}; accepted is one whose tokens decode to the text, or "
            "to one with the same normal form NFC"
        )


def alphabet_of_bytes() -> dict[str, int]:
    """The bytes by the characters that files have for them. Those of Latin-1 that are visible stand
    for themselves, and all others, in order, have the characters from 256 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(x): x for x in visible} | {chr(256 + i): x for i, x in enumerate(others)}
