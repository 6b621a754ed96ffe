"""The tokenizer of the World models as a `tokenizer.json` of Hugging Face.

The package `tokenizers` has no search for the longest token. Converters write the vocabulary as
words, and a regular expression of all of them, from the longest to the shortest, that splits text
into words. To follow it takes a hundred times as long as the search that it stands for.
"""

import itertools
import re
from collections.abc import Mapping
from typing import Any

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
_SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
_ALTERNATIVE = re.compile(r"(?:[^\\|()\[\]{}?*+.^$]|\\[^\w\s])+")
_ALTERNATIVES = re.compile(rf"\(\?:({_ALTERNATIVE.pattern}(?:\|{_ALTERNATIVE.pattern})*)\)")
_ESCAPED = re.compile(r"\\(.)")
_TO_ESCAPE = re.compile(r"[\\.^$|?*+()\[\]{}]")


def longest_words(description: Mapping[str, Any], alphabet: Mapping[str, int]) -> dict[int, bytes]:
    """The bytes of each token of a file whose tokenizer is the search for the longest one; nothing
    if it is another tokenizer.

    Args:
      description: the object in the file.
      alphabet: the bytes by the characters that the file has for them.
    """
    model, steps = description.get("model"), description.get("pre_tokenizer")
    if (
        not isinstance(model, dict)
        or model.get("type") != "WordLevel"
        or not isinstance(steps, dict)
        or description.get("normalizer") is not None
    ):
        return {}
    match steps.get("pretokenizers"):
        case [{**to_bytes}, {"pattern": {"Regex": str(pattern)}, **split}]:
            pass
        case _:
            return {}
    # `trim_offsets` is about the places of tokens in the text.
    if {**to_bytes, "trim_offsets": None} != {**_BYTES, "trim_offsets": None} or split != _SPLIT:
        return {}
    found = _ALTERNATIVES.fullmatch(pattern)
    words = [_ESCAPED.sub(r"\1", x) for x in _ALTERNATIVE.findall(found[1])] if found else []
    vocabulary = model.get("vocab")
    if (
        not isinstance(vocabulary, dict)
        or any(len(x) < len(y) for x, y in itertools.pairwise(words))
        or not {*words} >= alphabet.keys() >= {*"".join(words)}
        or not all(type(vocabulary.get(word)) is int for word in words)
    ):
        return {}
    return {vocabulary[word]: bytes(map(alphabet.__getitem__, word)) for word in words}


def description(
    pieces: Mapping[int, bytes], alphabet: Mapping[str, int], end_of_text: tuple[str, int]
) -> dict[str, Any]:
    """The object of a file whose tokenizer is the search for the longest of these tokens, and which
    has a special token for the end of a text."""
    characters = {byte: x for x, byte in alphabet.items()}
    words = {"".join(map(characters.__getitem__, x)): token for token, x in pieces.items()}
    longest_first = sorted(words, key=len, reverse=True)
    pattern = "|".join(_TO_ESCAPE.sub(r"\\\g<0>", word) for word in longest_first)
    end, token = end_of_text
    special = {"id": token, "content": end, "special": True, "normalized": False}
    special |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    split = {**_SPLIT, "pattern": {"Regex": f"(?:{pattern})"}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**_BYTES, "trim_offsets": True}, split],
        },
        "post_processor": None,
        "decoder": {**_BYTES, "trim_offsets": True},
        "model": {"type": "WordLevel", "vocab": {end: token, **words}, "unk_token": end},
    }
