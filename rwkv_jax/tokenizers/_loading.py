"""Which tokenizer a name, a file or a model has."""

import os

from rwkv_jax import _files
from rwkv_jax.tokenizers._hugging_face import hugging_face
from rwkv_jax.tokenizers._tokenizer import Tokenizer
from rwkv_jax.tokenizers._world import FILE, VOCABULARY, world

_BY_SIZE = {VOCABULARY: "world", 256: "bytes"}
_IN_FOLDER = ("tokenizer.json", FILE)


def load(name_or_path: str | os.PathLike[str], vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer with a name or in a file.

    `name_or_path` is one of

    - "world": the tokenizer of the RWKV World models, which has the longest token that fits, from
      the left. The token 0 is the end of a text.
    - a `.txt` file: such a tokenizer with the vocabulary in the file, which has the form of
      `rwkv_vocab_v20230424.txt`.
    - a `.json` file: a `tokenizer.json` of Hugging Face with the decoder ByteLevel, such as
      `20B_tokenizer.json` of the RWKV-4 models of the Pile, or the vocabulary of the World models
      in that form, which is as fast as "world". Special tokens have no text, and the text of one
      is encoded as any other text. Truncation, padding and dropout are ignored. A file that changes
      text, other than to one with the same normal form NFC, is refused: one that adds a space in
      front, that changes to lower case, or that leaves out whitespace.
    - "bytes": each byte of the text in UTF-8 is a token.

    Args:
      name_or_path: the name or the path.
      vocab_size: the number of tokens of the model, which may have more than the tokenizer: those
        have no text. If None, it is that of the tokenizer, and 65536 for "world".

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: a package that the tokenizer needs is not installed.
      ValueError: there is no such name; or the file is no regular one, has more than 8 MiB (`.txt`)
        or 32 MiB (`.json`), or has no tokenizer or one that changes text; or the tokenizer has
        more tokens than `vocab_size`.
    """
    name, path = str(name_or_path), _files.expanded(name_or_path)
    if name == "world":
        return world(name, None, VOCABULARY if vocab_size is None else vocab_size)
    if name == "bytes":
        pieces = {byte: bytes([byte]) for byte in range(256)}
        size = 256 if vocab_size is None else vocab_size
        return Tokenizer(name, size, pieces, lambda text: list(text.encode()))
    if path.suffix == ".txt":
        return world(name, path, vocab_size)
    if path.suffix == ".json":
        return hugging_face(name, path, vocab_size)
    raise ValueError(
        f"tokenizer is {name!r}; accepted are 'world', 'bytes', the path of a .json file of "
        f"Hugging Face, and that of a .txt file such as {FILE}"
    )


def for_vocabulary(vocab_size: int, *, checkpoint: str | os.PathLike[str] | None = None) -> str:
    """The name or path, for `load`, of the tokenizer that fits a model.

    Args:
      vocab_size: the number of tokens of the model.
      checkpoint: the path of the model. If it is a folder with a `tokenizer.json` or a
        `rwkv_vocab_v20230424.txt`, that file is the tokenizer.

    Raises:
      ValueError: the number does not tell the tokenizer. 65536 tells "world", and 256 "bytes".
    """
    if checkpoint is not None:
        for name in _IN_FOLDER:
            if (path := _files.expanded(checkpoint) / name).is_file():
                return str(path)
    if vocab_size in _BY_SIZE:
        return _BY_SIZE[vocab_size]
    known = " and ".join(f"{size} ({name!r})" for size, name in _BY_SIZE.items())
    raise ValueError(
        f"the vocabulary has {vocab_size} tokens, and a tokenizer is known for {known} alone; give "
        "the path of its tokenizer.json, which is 20B_tokenizer.json for the RWKV-4 models of the "
        "Pile"
    )
