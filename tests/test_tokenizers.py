"""`rwkv_jax.tokenizers`: text to tokens and back, whole and in streams."""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import tokenizers as hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_jax import tokenizers
from rwkv_jax.tokenizers._writing import world_files
from support.vocabularies import write_vocabulary

KINDS = ("world", "vocabulary.txt", "tokenizer.json", "bytes")
TEXT = "".join(map(chr, range(0x180))) + "  \n\n\t    x = 1 世界 🙂\U0010ffff\uffff"

# Without the tables of Unicode, which take Hypothesis seconds to make.
CHARACTERS = st.one_of(st.integers(0, 0xD7FF), st.integers(0xE000, 0x10FFFF)).map(chr)
TEXTS = st.lists(st.one_of(CHARACTERS, st.sampled_from("the d  \n\n世界\x000123"))).map("".join)
examples = settings(max_examples=60, deadline=None, database=None)


def write_tokenizer(path: Path, every_byte: bool = True) -> Path:
    """A tokenizer of Hugging Face for bytes, with pairs of them, a special and an added token."""
    made = hugging_face.Tokenizer(hugging_face.models.BPE())
    made.pre_tokenizer = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = hugging_face.decoders.ByteLevel()
    trainer = hugging_face.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=hugging_face.pre_tokenizers.ByteLevel.alphabet() if every_byte else [],
        show_progress=False,
    )
    made.train_from_iterator(["the end of the text, the text of the end, 世界世界"], trainer)
    made.add_tokens([hugging_face.AddedToken("    ", normalized=False)])
    made.save(str(path))
    return path


def write_words(path: Path, *words: str) -> Path:
    """The bytes and some words as converters write the vocabulary of the World models."""
    to_bytes = hugging_face.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    of_bytes = ["".join(x for x, _ in to_bytes.pre_tokenize_str(word)) for word in words]
    pieces = [*sorted(hugging_face.pre_tokenizers.ByteLevel.alphabet()), *of_bytes]
    vocabulary = {piece: token for token, piece in enumerate(["<|endoftext|>", *pieces, "\ue000x"])}
    pieces.sort(key=len, reverse=True)
    escaped = [re.sub(r"[\\.^$|?*+()\[\]{}]", r"\\\g<0>", x) for x in pieces]
    pattern = hugging_face.Regex(f"(?:{'|'.join(escaped)})")
    made = hugging_face.Tokenizer(
        hugging_face.models.WordLevel(vocabulary, unk_token="<|endoftext|>")
    )
    split = hugging_face.pre_tokenizers.Split(pattern, "isolated")
    made.pre_tokenizer = hugging_face.pre_tokenizers.Sequence([to_bytes, split])
    made.decoder = hugging_face.decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(path))
    return path


ByKind: TypeAlias = dict[str, tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def by_kind(tmp_path_factory: pytest.TempPathFactory) -> ByKind:
    folder = tmp_path_factory.mktemp("tokenizers")
    write_vocabulary(folder / "vocabulary.txt", ["the", "the end", " ", "  ", "界 "])
    write_tokenizer(folder / "tokenizer.json")
    paths = {kind: folder / kind if "." in kind else kind for kind in KINDS}
    return {kind: tokenizers.load(path) for kind, path in paths.items()}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest, by_kind: ByKind) -> tokenizers.Tokenizer:
    return by_kind[request.param]


def streamed(tokenizer: tokenizers.Tokenizer, tokens: Iterable[int]) -> str:
    stream = tokenizers.Stream(tokenizer)
    text = "".join(stream.push(token) for token in tokens)
    return text + stream.finish()


def test_text_and_back(tokenizer: tokenizers.Tokenizer) -> None:
    @settings(examples, max_examples=30)
    @given(TEXTS)
    def check(text: str) -> None:
        tokens = tokenizer.encode(text)
        assert tokenizer.end_of_text not in tokens
        assert tokenizer.decode(tokens) == text == streamed(tokenizer, tokens)
        assert tokenizer.decode_bytes(tokens) == text.encode()

    check()
    for text in (TEXT, "", "<|endoftext|>", "the end", "the en", "th"):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(np.array(tokens, np.int32)) == text == streamed(tokenizer, tokens)


def test_any_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    """Tokens that split characters, and bytes that are no UTF-8."""
    bytes_first = st.integers(0, min(300, tokenizer.vocab_size) - 1)

    @examples
    @given(st.lists(st.one_of(bytes_first, st.integers(0, tokenizer.vocab_size - 1))))
    def check(tokens: list[int]) -> None:
        pieces = [tokenizer.decode_bytes([token]) for token in tokens]
        assert tokenizer.decode_bytes(tokens) == b"".join(pieces)
        text = b"".join(pieces).decode(errors="replace")
        assert tokenizer.decode(tokens) == text == streamed(tokenizer, tokens)

    check()


def test_stream_within_a_character(tokenizer: tokenizers.Tokenizer) -> None:
    single = {tokenizer.decode_bytes([x]): x for x in range(min(300, tokenizer.vocab_size))}
    assert {bytes([byte]) for byte in range(256)} <= single.keys()
    face = [single[bytes([byte])] for byte in "🙂".encode()]
    stream = tokenizers.Stream(tokenizer)
    assert [stream.push(token) for token in face] == ["", "", "", "🙂"]
    assert [stream.push(token) for token in (*face[:2], single[b"a"])] == ["", "", "\ufffda"]
    assert [stream.push(face[0]), stream.finish(), stream.finish()] == ["", "\ufffd", ""]


@pytest.mark.usefixtures("unchecked_types")
def test_no_tokens_and_no_text(tokenizer: tokenizers.Tokenizer) -> None:
    for token in (-1, 1 << 40, tokenizer.vocab_size):
        message = f"a token is {token}; accepted are 0 to {tokenizer.vocab_size - 1}"
        for call in (tokenizer.decode, tokenizer.decode_bytes, partial(streamed, tokenizer)):
            with pytest.raises(ValueError, match=message):
                call([1, token])
    with pytest.raises(TypeError, match="'float' object"):
        tokenizer.decode([1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnicodeEncodeError, match="surrogates"):
        tokenizer.encode("\ud83d")


def test_sizes_and_ends(by_kind: ByKind) -> None:
    assert {kind: (x.vocab_size, x.end_of_text) for kind, x in by_kind.items()} == {
        "world": (65536, 0),
        "vocabulary.txt": (262, 0),
        "tokenizer.json": (271, 0),
        "bytes": (256, None),
    }
    for kind in ("world", "vocabulary.txt", "tokenizer.json"):
        assert by_kind[kind].decode_bytes([0]) == b""
    assert by_kind["world"].decode([65530, 65535]) == ""


def test_longest_tokens(by_kind: ByKind) -> None:
    assert by_kind["vocabulary.txt"].encode("the end the en") == [258, 259, 257, 259, 102, 111]
    # The figures are those of the package rwkv.
    first = {"Hello": 33155, " ": 33, "世": 10267, "界": 14610, "\0": 1, ",": 45, " the": 22590}
    others = {"  ": 267, "long": 26170, "est": 7513, "\n\n ": 3329, "token": 35782}
    tokens = first | others
    assert by_kind["world"].encode("".join(tokens)) == list(tokens.values())


def test_as_hugging_face(by_kind: ByKind) -> None:
    made = hugging_face.Tokenizer.from_file(by_kind["tokenizer.json"].name)
    assert by_kind["tokenizer.json"].encode(TEXT) == made.encode(TEXT).ids
    tokens = np.random.default_rng(0).integers(0, 271, 2000).tolist()
    assert by_kind["tokenizer.json"].decode(tokens) == made.decode(tokens)


def test_size_of_the_model(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.txt", ["the"])
    assert tokenizers.load(path, 300).decode([102, 299]) == "e"
    for name, vocabulary, last in ((path, 257, 257), ("bytes", 255, 255)):
        message = f"to {last}; accepted with a vocabulary of {vocabulary}"
        with pytest.raises(ValueError, match=message):
            tokenizers.load(name, vocabulary)


def test_for_vocabulary(tmp_path: Path) -> None:
    assert tokenizers.for_vocabulary(65536, checkpoint=tmp_path) == "world"
    assert tokenizers.for_vocabulary(256, checkpoint=tmp_path / "model.pth") == "bytes"
    with pytest.raises(ValueError, match=r"has 50277 tokens, .* 20B_tokenizer\.json"):
        tokenizers.for_vocabulary(50277)
    for name in ("rwkv_vocab_v20230424.txt", "tokenizer.json"):
        (tmp_path / name).touch()
        assert tokenizers.for_vocabulary(65536, checkpoint=tmp_path) == str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("other", "", "tokenizer is '.*other'; accepted are 'world', 'bytes', "),
        ("a.txt", "1 'a' 2", r"a\.txt: line 1 is .1 'a' 2.; accepted is a line such as"),
        ("a.txt", "1 exit() 2", "line 1 is '1 exit"),
        ("a.txt", f"1 {'(' * 10000} 2", "line 1 is "),
        ("a.txt", r"1 '\ud800' 3", "line 1 is "),
        ("a.txt", f"{'1' * 5000} 'a' 1", "line 1 is "),
        ("a.txt", f"1 '{'a' * 4000}' 4000", "line 1 is "),
        ("a.txt", "1 (b'a') 1", "line 1 is "),
        ("a.txt", "1 'a' 1\n1 'b' 1", "line 2 has the token 1, which is taken"),
        ("a.txt", "0 'a' 1", "line 1 has the token 0, which is taken"),
        ("a.txt", "1 'a' 1", "there is no token for the byte 0"),
        ("a.txt", "\udcff", "the file is no text in UTF-8"),
        ("a.json", "{}", r"a\.json: the file has no tokenizer: "),
        ("a.json", "[]", r"a\.json: the file has no tokenizer: "),
        ("a.json", "nothing", r"a\.json: the file has no tokenizer: "),
        ("a.json", '{"decoder": [{}]}', "has no tokenizer: Cannot instantiate"),
    ],
)
def test_wrong_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, errors="surrogateescape")
    with pytest.raises(ValueError, match=message):
        tokenizers.load(tmp_path / name)


@pytest.mark.parametrize(("name", "most"), [("tokenizer.json", 2**25), ("vocabulary.txt", 2**23)])
def test_files_that_are_not_read(tmp_path: Path, name: str, most: int) -> None:
    """No file, a pipe, which nobody writes to, and a file that is larger than any tokenizer."""
    path = tmp_path / name
    with pytest.raises(FileNotFoundError, match=name):
        tokenizers.load(path)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=f"{name}: the path is no regular file"):
        tokenizers.load(path)
    path.unlink()
    path.touch()
    os.truncate(path, most + 1)
    with pytest.raises(ValueError, match=f"has {most + 1} bytes; accepted are at most {most}"):
        tokenizers.load(path)


def test_lines_that_end_as_on_windows(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.txt", ["the"])
    expected = tokenizers.load(path).encode("the end")
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert tokenizers.load(path).encode("the end") == expected


def change(path: Path, *, model: Mapping[str, Any] = {}, **changed: Any) -> Path:
    """A file of `write_tokenizer` with other values."""
    content = json.loads(write_tokenizer(path).read_text()) | changed
    content["model"] |= model
    path.write_text(json.dumps(content))
    return path


def test_all_of_a_text_is_encoded_in_one_way(tmp_path: Path) -> None:
    """Whatever a file says of truncation, padding and dropout."""
    text, path = 10 * "the end of the text ", tmp_path / "tokenizer.json"
    expected = tokenizers.load(write_tokenizer(path)).encode(text)
    saved = hugging_face.Tokenizer.from_file(str(change(path, model={"dropout": 0.5})))
    saved.enable_truncation(8)
    saved.enable_padding(length=500)
    saved.save(str(path))
    assert len(saved.encode(text).ids) == 500  # so that there is something to ignore
    assert tokenizers.load(path).encode(text) == expected


NFC = {"type": "NFC"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
REMOVED = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"decoder": {"type": "Fuse"}}, "decoder is Fuse; accepted is ByteLevel"),
        ({"decoder": None}, "decoder is None; accepted is ByteLevel"),
        ({"normalizer": {"type": "Lowercase"}}, "makes 'abc.*' of the text 'ABC"),
        ({"normalizer": {"type": "NFKC"}}, r"makes ' ¡.*' of the text '\\xa0¡"),
        ({"normalizer": {"type": "StripAccents"}}, "of the text"),
        (
            {"normalizer": {"type": "Strip", "strip_left": False, "strip_right": True}},
            r"makes '' of the text ' \\n '",
        ),
        ({"normalizer": {"type": "Prepend", "prepend": "a"}}, r"makes 'a.*' of the text '\\x00"),
        ({"pre_tokenizer": BYTES | {"add_prefix_space": True}}, r"makes ' .*' of the text '\\x00"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [REMOVED, BYTES]}}, "of the text"),
        ({"model": {"end_of_word_suffix": "x"}}, "of the text"),
    ],
    ids=lambda x: str(x)[:60],
)
def test_what_changes_text_is_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = change(tmp_path / "tokenizer.json", **changed)
    with pytest.raises(ValueError, match=rf"tokenizer\.json: the .*{message}"):
        tokenizers.load(path)


def test_a_text_that_is_changed_is_refused(tmp_path: Path) -> None:
    """Even if all others are not, from the first character that differs on."""
    replace = {"type": "Replace", "pattern": {"String": "colour"}, "content": "color"}
    tokenizer = tokenizers.load(change(tmp_path / "tokenizer.json", normalizer=replace))
    assert tokenizer.decode(tokenizer.encode("a color")) == "a color"
    with pytest.raises(ValueError, match=r"json: the tokenizer makes 'r' of the text 'ur'; accept"):
        tokenizer.encode("a colour")


@pytest.mark.parametrize("normalizer", [NFC, {"type": "Sequence", "normalizers": [NFC]}], ids=str)
def test_a_normal_form_is_the_same_text(tmp_path: Path, normalizer: dict[str, Any]) -> None:
    """Models of the Pile have such a tokenizer."""
    tokenizer = tokenizers.load(change(tmp_path / "tokenizer.json", normalizer=normalizer))
    assert tokenizer.decode(tokenizer.encode("e\u0301 é")) == "é é"


def test_bytes_without_a_token(tmp_path: Path) -> None:
    """Texts of other bytes are encoded."""
    tokenizer = tokenizers.load(write_tokenizer(tmp_path / "tokenizer.json", every_byte=False))
    assert tokenizer.decode(tokenizer.encode("the text, the end")) == "the text, the end"
    with pytest.raises(ValueError, match="accepted is one whose tokens decode to the text"):
        tokenizer.encode("the text?")


def test_world_as_a_file_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of the package, which is not needed; the last token has no text."""
    path = write_words(tmp_path / "tokenizer.json", "the", "the end", "  ", "(a|b)*", "\\n", "世界")
    made = hugging_face.Tokenizer.from_file(str(path))
    made.encode_special_tokens = True
    folder = tokenizers.for_vocabulary(264, checkpoint=tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    tokenizer = tokenizers.load(folder, 264)
    assert (tokenizer.end_of_text, tokenizer.decode([0, 263])) == (0, "")
    for text in (TEXT, "", "<|endoftext|>", "the end", "the en (a|b)*\\n\\"):
        tokens = tokenizer.encode(text)
        assert tokens == made.encode(text).ids
        assert tokenizer.decode(tokens) == text


def test_words_that_are_not_the_longest(tmp_path: Path) -> None:
    """The package then encodes: a shorter word is before a longer one, or a byte is none."""
    path = write_words(tmp_path / "tokenizer.json", "the", "the end")
    content = json.loads(path.read_text())
    split = content["pre_tokenizer"]["pretokenizers"][1]
    first, second, *others = split["pattern"]["Regex"][3:-1].split("|")
    for words in ((second, first, *others), (first, second, *others[:-1])):
        split["pattern"]["Regex"] = f"(?:{'|'.join(words)})"
        path.write_text(json.dumps(content))
        made = hugging_face.Tokenizer.from_file(str(path))
        assert tokenizers.load(path).encode("the end") == made.encode("the end").ids
    content["model"] = {"type": "RwkvTrie"}
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"RwkvTrie, .* accepted .* is the tokenizer 'world'"):
        tokenizers.load(path)


def test_world_without_the_fast_encoder(by_kind: ByKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens are those of pyrwkv-tokenizer, where it has wheels."""
    monkeypatch.setitem(sys.modules, "pyrwkv_tokenizer", None)
    plain, world = tokenizers.load("world"), by_kind["world"]

    @examples
    @given(TEXTS)
    def check(text: str) -> None:
        assert plain.encode(text) == world.encode(text)

    check()
    text = Path(tokenizers.__file__).with_name("_world.py").read_text()
    assert plain.encode(text) == world.encode(text)


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in ("world", write_tokenizer(tmp_path / "tokenizer.json")):
        with pytest.raises(ImportError, match=r"pip install 'rwkv-jax\[text\]'"):
            tokenizers.load(name)


def test_a_vocabulary_written_for_hugging_face(tmp_path: Path) -> None:
    """Its package and this one make the tokens of the vocabulary of the file."""
    words = ["the", "the end", "  ", "(a|b)*", "\\n", "世界", "界 "]
    vocabulary = write_vocabulary(tmp_path / "vocabulary.txt", words)
    for name, content in world_files(vocabulary).items():
        (tmp_path / name).write_bytes(content)
    made = hugging_face.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.encode_special_tokens = True
    expected, found = (tokenizers.load(tmp_path / x) for x in (vocabulary, "tokenizer.json"))
    assert found.end_of_text == made.token_to_id("<|endoftext|>") == 0
    for text in (TEXT, "", "<|endoftext|>", "the end", "the en (a|b)*\\n\\ 世界 界"):
        tokens = expected.encode(text)
        assert tokens == made.encode(text).ids == found.encode(text)
        assert made.decode(tokens) == text
