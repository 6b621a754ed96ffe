"""`rwkv_jax.data`: documents of files, and the batches in which they are packed."""

import collections
import functools
import itertools
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from rwkv_jax import chat, data, tokenizers
from rwkv_jax.losses import cross_entropy
from rwkv_jax.models import rwkv7
from support.models import VOCABULARY, parameters
from support.vocabularies import write_vocabulary

USER, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}
CALL = {"function": {"name": "f", "arguments": {}}}
CALLED = {"role": "assistant", "tool_calls": [CALL]}
TALK = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": "fine."},
    MORE,
    {"role": "assistant", "content": " <think>\nx</think>\nok"},
]
CHATML = """\
{%- for x in messages -%}
    {{- '<|im_start|>' + x.role + '\\n' + x.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# The prompt has thoughts that the conversation has not.
FAKE = """\
{%- for x in messages -%}{{- x.role + ': ' + x.content + '\\n\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: <think></think>' -}}{%- endif -%}
"""
# Earlier thoughts are left out.
FORGETS = """\
{%- for x in messages -%}
    {{- x.content if loop.last else x.content.split('</think>')[-1] -}}
{%- endfor -%}
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> tokenizers.Tokenizer:
    """With tokens that join the end of a prompt and an answer, and an answer and what follows."""
    words = [": f", ".\n\n", " fine", "User", "\n\nUser", "more", "t\n", " <think"]
    return tokenizers.load(write_vocabulary(tmp_path / "words.txt", words))


def lines(path: Path, *objects: Any) -> Path:
    path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in objects))
    return path


def every(source: data.Source) -> list[data.Document]:
    return [source[i] for i in range(len(source))]


def texts(tokenizer: tokenizers.Tokenizer, document: data.Document) -> list[str]:
    """The runs of tokens that count, and those of the others, which come first."""
    ends = np.flatnonzero(np.diff(document.counts)) + 1
    runs = np.split(document.tokens, ends)
    return [""] * int(document.counts[0]) + [tokenizer.decode(x) for x in runs]


def test_text(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    def found(paths: Any, separator: str | None = None) -> list[str]:
        source = data.Text(paths, tokenizer, separator=separator)
        documents = every(source)
        assert len(source) == len(documents)
        for document in documents:
            assert document.tokens.dtype == np.int32
            assert document.tokens[-1] == 0
            assert document.counts.all()
        return [tokenizer.decode(x.tokens) for x in documents]

    a, b, c = (tmp_path / name for name in "abc")
    a.write_bytes("\ufeffone\n\n世\n".encode())
    b.write_bytes(b"<|e|>\r\none\r\n<|e|>\r\ntwo <|e|>\n\n\n<|e|>\nthree\n<|e|>")
    c.write_bytes(b"\n \none\ntwo\n\n\n \r\nthree\n\n")
    assert found([a, b]) == ["one\n\n世\n", b.read_bytes().decode()]
    assert found(str(b), "<|e|>") == ["one", "two <|e|>", "three"]
    assert found([c, a], "") == ["one\ntwo", "three", "one", "世"]
    with pytest.raises(ValueError, match=r"separator is 'a\\nb'; accepted is one line"):
        data.Text(a, tokenizer, separator="a\nb")


@pytest.mark.parametrize("line", ["a line\n", "世"])
def test_parts_of_a_text(tmp_path: Path, tokenizer: tokenizers.Tokenizer, line: str) -> None:
    """They are all of it, and begin at lines, if there are any. The last one, which may be blank,
    has its end."""
    path, size = tmp_path / "a", 2**22 // len(line.encode()) + 1
    blank = "\n" * 2**18
    path.write_text("\ufeff" + line * size + blank)
    source = data.Text(path, tokenizers.load("bytes"), part=2**17)
    parts = [bytes(x.tokens.astype(np.uint8)).decode() for x in every(source)]
    assert "".join(parts) == line * size + blank
    assert len(parts) == 34
    assert {x[: len(line)] for x in parts[:32]} == {line}
    source = data.Text(path, tokenizer, part=2**17)
    assert [bool(source[i].tokens[-1]) for i in (0, 32, 33)] == [True, True, False]
    with pytest.raises(ValueError, match="Text: part is 1023; accepted is an integer from 1024 on"):
        data.Text(path, tokenizer, part=1023)


def test_json_lines(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    first = lines(tmp_path / "a", {"text": "one\n", "more": 1}, "\n", {"text": "二"}, "\r\n")
    second = lines(tmp_path / "b", '{"text": "three"}')
    source = data.JsonLines([first, second], tokenizer)
    assert [tokenizer.decode(x.tokens) for x in every(source)] == ["one\n", "二", "three"]
    assert source[1].tokens.tolist() == [*tokenizer.encode("二"), 0]
    assert source[-1].counts.all()
    plain = data.JsonLines(second, tokenizers.load("bytes"))
    assert plain[0].tokens.tolist() == list(b"three")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("form", "messages", "expected"),
    [
        (
            chat.G1(),
            TALK,
            [
                "System: Be brief.\n\nUser: hi\n\nAssistant:",
                " fine.\n\nUser:",
                " more\n\nAssistant:",
                " <think>\nx</think>\nok",
            ],
        ),
        (
            chat.G1(think="on"),
            TALK[1:],
            [
                "User: hi\n\nAssistant:",
                " fine.\n\nUser:",
                " more\n\nAssistant: <think",
                ">\nx</think>\nok",
            ],
        ),
        (
            chat.G1(),
            [*TALK[:3], MORE],
            ["System: Be brief.\n\nUser: hi\n\nAssistant:", " fine.\n\nUser:", " more"],
        ),
        (
            chat.G1(tools=[{"name": "f"}]),
            [USER, CALLED, {"role": "tool", "content": "1"}, TALK[2]],
            [
                "### System\n### `f`\n**Parameters:**\n```json\n{}\n```\n"
                "### User\nhi\n### Assistant",
                '\n**Tool Call:**\n```json\n{\n  "name": "f",\n  "arguments": {}\n}\n```'
                "\n### Tool Output",
                "\n```json\n1\n```\n### Assistant",
                "\nfine.",
            ],
        ),
        (
            CHATML,
            TALK[1:],
            [
                "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
                "fine.<|im_end|>\n<|im_start|>user",
                "\nmore<|im_end|>\n<|im_start|>assistant\n",
                " <think>\nx</think>\nok<|im_end|>\n",
            ],
        ),
        (FAKE, TALK[1:3], ["user: hi\n\nassistant:", " fine.\n\n"]),
    ],
)
def test_answers(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, form: Any, messages: Any, expected: list[str]
) -> None:
    if isinstance(form, str):
        pytest.importorskip("jinja2")
        (tmp_path / "chat_template.jinja").write_text(form)
        form = chat.Template(tmp_path)
    path = lines(tmp_path / "a", {"messages": messages})
    document = data.JsonLines(path, tokenizer, form=form)[0]
    assert texts(tokenizer, document) == expected
    if isinstance(form, chat.G1) and form.tools:
        path = lines(tmp_path / "b", {"messages": messages, "tools": form.tools})
        assert texts(tokenizer, data.JsonLines(path, tokenizer)[0]) == expected
    assert document.tokens[-1] == 0
    assert bool(document.counts[-1]) == (messages[-1]["role"] == "assistant")


@pytest.mark.quick
def test_special_tokens_of_a_template(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """They are the token for the end of a text, which no message can have."""
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}"
        "{{ '<|rwkv_tokenizer_end_of_text|>' if m.role == 'assistant' else '\n\n' }}{% endfor %}"
        "{{ 'assistant:' if add_generation_prompt }}"
    )
    form = chat.Template(tmp_path)
    assert form.stop == ()
    talk = [{"role": "user", "content": "<|endoftext|>"}, TALK[2]]
    document = data.JsonLines(lines(tmp_path / "a", {"messages": talk}), tokenizer, form=form)[0]
    prompt = [0, *tokenizer.encode("user: <|endoftext|>\n\nassistant:")]
    answer = [*tokenizer.encode(" fine."), 0]
    assert document.tokens.tolist() == [*prompt, *answer]
    assert document.counts.tolist() == [False] * len(prompt) + [True] * len(answer)
    asked = form.render(talk[:1])
    assert form.tokenizer(tokenizer).encode(asked) == prompt
    assert form.tokenizer(tokenizers.load("bytes")).encode(asked) == [
        *b"user: <|endoftext|>\n\nassistant:"
    ]
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        tokenizer.encode(asked)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "x"', "Expecting ',' delimiter"),
        ("  ", "Expecting value"),
        (b"\xff\xfe\xfd\n", "can't decode"),
        ("[" * 10**5, "recursion"),
        ('{"text": " "}', "the document is empty"),
        (r'{"text": "\ud800"}', "surrogates not allowed"),
        ('{"txt": 1}', r"the line is \{'txt': 1\}; accepted is an object with either a text as"),
        ('{"text": 1}', "accepted is an object"),
        ('{"text": "x", "messages": []}', "accepted is an object"),
        ("[1]", "accepted is an object"),
        ('{"messages": "x"}', "accepted is an object"),
        ('{"messages": []}', "no answer of the assistant"),
        ({"messages": [USER]}, "no answer of the assistant"),
        ({"messages": [{"role": "bot", "content": ""}]}, "message 1 has the role 'bot'; accepted"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2 has the content None"),
        ({"messages": ["x"]}, "message 1 is a str"),
        ({"messages": TALK, "tools": [{}]}, r"G1: tool 1 is \{\}; accepted is an object with the"),
        (
            {"messages": TALK, "tools": {"name": "f"}},
            r"tools is \{'name': 'f'\}; accepted is a list",
        ),
        (
            {"messages": [USER, CALLED, TALK[0]]},
            "the conversation has tool calls; accepted is a line with `tools`, or a form",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_lines_that_are_refused(
    tmp_path: Path, tokenizer: tokenizers.Tokenizer, line: Any, message: str
) -> None:
    """The other lines are read, and the error names the file and the line."""
    path = lines(tmp_path / "a", {"text": "one"}, "\n")
    line = json.dumps(line) if isinstance(line, dict) else line
    line = line.encode() if isinstance(line, str) else line
    path.write_bytes(path.read_bytes() + line + b'\n{"text": "two"}')
    source = data.JsonLines(path, tokenizer)
    assert [tokenizer.decode(source[i].tokens) for i in (0, 2)] == ["one", "two"]
    with pytest.raises(ValueError, match=message) as error:
        source[1]
    assert str(error.value).startswith(f"{path}: line 3: ")


def test_template_that_forgets(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "chat_template.jinja").write_text(FORGETS)
    path = lines(tmp_path / "a", {"messages": [*TALK[3:], USER]}, {"messages": TALK[3:]})
    source = data.JsonLines(path, tokenizer, form=chat.Template(tmp_path))
    assert texts(tokenizer, source[1]) == ["more", TALK[4]["content"]]
    with pytest.raises(ValueError, match="line 1: message 2 is written in another way once"):
        source[0]


def test_files_that_are_refused(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    path = tmp_path / "a"
    for source in (data.Text, data.JsonLines):
        with pytest.raises(FileNotFoundError):
            source(path, tokenizer)
        with pytest.raises(ValueError, match="no regular file"):
            source(tmp_path, tokenizer)
        with pytest.raises(ValueError, match="there are no paths"):
            source([], tokenizer)
    for content, message in (("", "the file is empty"), ("\n\n", "the file has no document")):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"^{path}: {message}"):
            data.JsonLines(path, tokenizer)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ValueError, match="a pointer of Git LFS"):
        data.Text(path, tokenizer)
    path.write_bytes(b"one\n--\n\n--\n\xff\n")
    source = data.Text(path, tokenizer, separator="--")
    with pytest.raises(ValueError, match=f"^{path}: line 3: the document is empty"):
        source[1]
    with pytest.raises(ValueError, match=f"^{path}: line 5: 'utf-8' codec can't decode"):
        source[2]
    path.write_bytes(b"one")
    with pytest.raises(ValueError, match=f"^{path}: .*the file has become shorter"):
        source[2]


def bin_idx(
    path: Path,
    items: list[list[int]],
    bounds: list[int],
    *,
    code: int = 8,
    dtype: str = "<u2",
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    shift: int = 0,
) -> Path:
    """Files as the format says, by numpy."""
    tokens = [np.array(x, dtype) for x in items]
    sizes = np.array([len(x) for x in items], "<i4")
    pointers = np.cumsum([0, *(x.nbytes for x in tokens)][: len(items)], dtype="<i8") + shift
    path.with_suffix(".bin").write_bytes(b"".join(x.tobytes() for x in tokens))
    path.with_suffix(".idx").write_bytes(
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<QQ", len(items), len(bounds))
        + sizes.tobytes()
        + pointers.tobytes()
        + np.array(bounds, "<i8").tobytes()
    )
    return path


@pytest.mark.quick
@pytest.mark.parametrize(("code", "dtype"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "<u1")])
def test_bin_idx(tmp_path: Path, code: int, dtype: str) -> None:
    items = [[1, 2, 0], [200, 3], [4, 0], [0]]
    path = bin_idx(tmp_path / "a", items, [0, 1, 3, 4], code=code, dtype=dtype)
    for name in (path, f"{path}.bin", f"{path}.idx"):
        source = data.BinIdx(name, vocab_size=201)
        assert [x.tokens.tolist() for x in every(source)] == [[1, 2, 0], [200, 3, 4, 0], [0]]
    assert source.sizes.tolist() == [3, 4, 1]
    assert all(x.tokens.dtype == np.int32 and x.counts.all() for x in every(source))
    assert source.part(1, 1, 3).tokens.tolist() == [3, 4]
    data.write_bin_idx(tmp_path / "b.c", items, dtype=np.dtype(dtype))
    bin_idx(tmp_path / "a", items, [0, 1, 2, 3, 4], code=code, dtype=dtype)
    for end in (".bin", ".idx"):
        assert (tmp_path / f"b.c{end}").read_bytes() == (tmp_path / f"a{end}").read_bytes()
    # A tool that ends no documents.
    bin_idx(path, items, [0], code=code, dtype=dtype)
    assert [x.tokens.tolist() for x in every(data.BinIdx(path, vocab_size=201))] == items


@pytest.mark.quick
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"magic": b"x" * 9}, "a.idx: the file is no index of tokens"),
        ({"version": 2}, "the version is 2 and the code of the dtype 8; accepted"),
        ({"code": 6}, "the code of the dtype 6; accepted .* 1, 2, 3, 4, 5, 8"),
        ({"items": [], "bounds": [0]}, "accepted is at least one item"),
        ({"bounds": [0, 1]}, "the bounds of documents do not go from 0 to 3"),
        ({"bounds": [0, 2, 1, 3]}, "the bounds of documents do not go"),
        ({"bounds": [0, 1, 1, 3]}, "a.idx: document 1 is empty"),
        ({"items": [[1], [], [2]]}, "a.idx: document 1 is empty"),
        ({"shift": 2}, "the items do not lie one after another"),
        ({"code": 4}, "a.idx: the items do not lie"),
        (
            {"code": 3, "dtype": "<i2", "items": [[1], [-1], [1]]},
            "has the token -1; accepted",
        ),
        ({"items": [[1], [2, 9], [1]]}, "a.bin: document 1 has the token 9; accepted are 0 to 8"),
    ],
)
def test_bin_idx_that_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    given = {"items": [[1], [2], [3]], "bounds": [0, 1, 2, 3]} | change
    path = bin_idx(tmp_path / "a", **given)
    with pytest.raises(ValueError, match=message):
        every(data.BinIdx(path, vocab_size=9))


def test_files_of_tokens_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        data.BinIdx(tmp_path / "a", vocab_size=9)
    path = bin_idx(tmp_path / "a", [[1], [2]], [0, 1, 2])
    index, tokens = path.with_suffix(".idx"), path.with_suffix(".bin")
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"a.bin: the file has 3 bytes; .*a.idx says 4"):
        data.BinIdx(path, vocab_size=9)
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"the file has 81 bytes; 82 are those of 2 items"):
        data.BinIdx(path, vocab_size=9)
    with pytest.raises(FileExistsError):
        data.write_bin_idx(path, [[1]])
    for number, wrong in enumerate(([], [65536], [-1], [1.5], [[1]])):
        with pytest.raises(ValueError, match="document 1 has the shape"):
            data.write_bin_idx(tmp_path / f"wrong {number}", [[1], wrong])
    with pytest.raises(ValueError, match="dtype is float32; accepted are uint8, "):
        data.write_bin_idx(tmp_path / "b", [[1]], dtype=np.float32)


class Numbers:
    """Documents of which each token tells the document, but for the last one, which is 0. Some of
    them are longer than a row."""

    def __init__(self, documents: int, first: int = 1):
        self._documents, self._first = documents, first

    def __len__(self) -> int:
        return self._documents

    def __getitem__(self, number: int, /) -> data.Document:
        number = range(len(self))[number]
        tokens = np.full(2 + 5 * number % 23, self._first + number, np.int32)
        tokens[-1] = 0
        return data.Document(tokens, np.ones(len(tokens), bool))


def stored(path: Path, source: data.Source) -> data.BinIdx:
    data.write_bin_idx(path, (x.tokens for x in every(source)))
    return data.BinIdx(path, vocab_size=65536)


def test_split(tmp_path: Path) -> None:
    """No document is in both parts, all are in one, and those of a longer source stay where they
    are."""
    numbers = Numbers(105)
    for source in (numbers, stored(tmp_path / "a", numbers)):
        parts = data.split(source, every=10)
        train, held_out = ([int(x.tokens[0]) for x in every(part)] for part in parts)
        assert [len(x) for x in parts] == [len(train), len(held_out)]
        assert len(held_out) in (10, 11)
        assert sorted(train + held_out) == list(range(1, 106))
        places = {(x - 1) % 10 for x in held_out}
        assert [(x - 1) // 10 for x in held_out] == list(range(len(held_out)))
        assert len(places) > 4
        longer = data.split(Numbers(345), every=10)[1]
        assert [int(x.tokens[0]) for x in every(longer)][:10] == held_out[:10]
        assert [int(x.tokens[0]) for x in every(data.split(Numbers(2), 2)[1])] in ([1], [2])
        if isinstance(source, data.SizedSource):
            for part in parts:
                assert isinstance(part, data.SizedSource)
                assert part.sizes.tolist() == [len(x.tokens) for x in every(part)]
                assert part.part(3, 1, 9).tokens.tolist() == part[3].tokens[1:9].tolist()
        with pytest.raises(IndexError):
            parts[1][len(held_out)]
    for wrong in (1, 106):
        with pytest.raises(ValueError, match=f"every is {wrong}; accepted are 2 to 105"):
            data.split(numbers, every=wrong)


def documents_in(batches: Iterator[data.Batch], context: int) -> Iterator[list[int]]:
    """The tokens of each part of a document in batches, with the last target."""
    for batch in batches:
        assert {x.dtype for x in batch if x.dtype != bool} == {np.dtype(np.int32)}
        assert {x.shape for x in batch} == {(len(batch.tokens), context)}
        assert not batch.mask[batch.segment_ids == 0].any()
        assert batch.efficiency == batch.mask.mean()
        assert batch.padding == 1 - (batch.segment_ids > 0).mean()
        for tokens, targets, _, segment_ids in zip(*batch, strict=True):
            ids = segment_ids[segment_ids > 0]
            assert np.array_equal(segment_ids[: len(ids)], ids)
            assert np.array_equal(np.unique(ids), np.arange(1, ids.max(initial=0) + 1))
            for i in np.unique(ids):
                part = np.flatnonzero(segment_ids == i)
                assert np.array_equal(part, np.arange(part[0], part[-1] + 1))
                assert np.array_equal(targets[part[:-1]], tokens[part[1:]])
                yield [*tokens[part].tolist(), int(targets[part[-1]])]


@pytest.mark.quick
@pytest.mark.parametrize("is_stored", [False, True])
def test_all_documents_are_in_the_batches(tmp_path: Path, is_stored: bool) -> None:
    """Each target is there once, next to the token before it, in parts of at most a row."""
    source: Any = Numbers(50)
    expected = collections.Counter()
    for document in every(source):
        tokens = document.tokens.tolist()
        expected.update(tuple(tokens[i : i + 9]) for i in range(0, len(tokens) - 1, 8))
    given = stored(tmp_path / "a", source) if is_stored else source
    batches = data.validation_batches([given, Numbers(2)], context=8, batch=16)
    found = collections.Counter(map(tuple, documents_in(batches, 8)))
    assert found == expected + collections.Counter([(1, 0), (2, 2, 2, 2, 2, 2, 0)])
    # Passes through a source, each in another order.
    count = sum(expected.values())
    training = data.training_batches([given], context=8, batch=16, seed=3)
    several = itertools.islice(documents_in(training, 8), 8 * count)
    assert set(map(tuple, several)) == set(expected)
    orders = [
        np.concatenate([x.tokens for x in itertools.islice(batches, 8)])
        for batches in (
            data.training_batches([given], context=8, batch=16, seed=seed) for seed in (3, 3, 4)
        )
    ]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])
    assert not np.array_equal(orders[0][:64], orders[0][64:])
    # The first rows have documents of the whole source.
    batches = data.training_batches([Numbers(4000)], context=8, batch=64, seed=0)
    assert np.ptp(next(batches).tokens[:, 0]) > 3000


def test_what_does_not_count() -> None:
    """Parts without an answer are left out, and so is what follows the last answer."""
    counts = np.zeros(30, bool)
    counts[[0, 11, 13, 29]] = True
    document = data.Document(np.arange(30, dtype=np.int32), counts)
    (batch,) = data.validation_batches([[document]], context=5, batch=2)
    assert batch.tokens.tolist() == [[10, 11, 12, 0, 0], [25, 26, 27, 28, 0]]
    assert batch.targets.tolist() == [[11, 12, 13, 0, 0], [26, 27, 28, 29, 0]]
    assert batch.mask.astype(int).tolist() == [[1, 0, 1, 0, 0], [0, 0, 0, 1, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert (batch.efficiency, batch.padding) == (0.3, 0.3)


def test_weights(tmp_path: Path) -> None:
    sources = [Numbers(30, 100), Numbers(9, 200), stored(tmp_path / "a", Numbers(50, 300))]
    batches = data.training_batches(sources, context=16, batch=6, seed=0, weights=[3, 1, 2])
    rows = np.concatenate([x.tokens[:, 0] // 100 for x in itertools.islice(batches, 50)])
    assert np.bincount(rows).tolist() == [0, 150, 50, 100]
    # In each batch as well.
    assert (np.sort(rows.reshape(50, 6)) == [1, 1, 1, 2, 3, 3]).all()


def test_resume(tmp_path: Path) -> None:
    """From each batch, in a new iterator and in one that is further, by a state that was JSON."""
    sources = [Numbers(40), stored(tmp_path / "a", Numbers(50, 300))]
    options: Any = {"context": 8, "batch": 6, "seed": 1, "weights": [2, 1]}
    batches = data.training_batches(sources, **options)
    states, expected = [], []
    for _ in range(40):
        states.append(json.dumps(batches.get_state()))
        expected.append(next(batches))
    for start in (*range(0, 40, 4), 39):
        for resumed in (batches, data.training_batches(sources, **options)):
            resumed.set_state(json.loads(states[start]))
            assert json.dumps(resumed.get_state()) == states[start]
            for batch, correct in zip(itertools.islice(resumed, 4), expected[start:], strict=False):
                for found, x in zip(batch, correct, strict=True):
                    np.testing.assert_array_equal(found, x)
    other = data.training_batches(sources, **options | {"seed": 2})
    with pytest.raises(ValueError, match=r"the state is of .* 1\}; accepted is one of .* 2\}$"):
        other.set_state(json.loads(states[0]))


@functools.partial(jax.jit, static_argnames="packed")
def loss_and_gradients(params: Any, batch: Any, packed: bool) -> Any:
    def loss(params: Any) -> jax.Array:
        hidden_states, _ = rwkv7.hidden_states(
            params,
            batch.tokens,
            segment_ids=batch.segment_ids if packed else None,
            kernels="reference",
        )
        return cross_entropy(
            hidden_states, params.head.weight, batch.targets, mask=batch.mask, reduction="sum"
        )

    return jax.value_and_grad(loss)(params)


def test_packed_equals_unpacked() -> None:
    """The loss and the gradients of a batch are the sums of those of each document alone."""
    rng = np.random.default_rng(0)
    documents = [
        data.Document(rng.integers(1, VOCABULARY, n, np.int32), rng.random(n) < 0.7)
        for n in (3, 12, 5, 7, 2, 9)
    ]
    params = parameters(rwkv7)
    (batch,) = data.validation_batches([documents], context=12, batch=4)
    assert batch.segment_ids.max() > 1
    found = loss_and_gradients(params, batch, packed=True)
    expected = jax.tree.map(np.zeros_like, found)
    for tokens, counts in documents:
        alone = np.zeros((4, 1, 12), np.int32)
        alone[:3, 0, : len(tokens) - 1] = tokens[:-1], tokens[1:], counts[1:]
        one = data.Batch(alone[0], alone[1], alone[2] > 0, alone[3])
        expected = jax.tree.map(np.add, expected, loss_and_gradients(params, one, packed=False))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5 * np.abs(y).max())


def test_errors_come_from_the_iterator(tmp_path: Path, tokenizer: tokenizers.Tokenizer) -> None:
    path = lines(tmp_path / "a", {"text": "one"}, "{")
    source = data.JsonLines(path, tokenizer)
    for batches in (
        data.validation_batches([source], context=8, batch=2),
        data.training_batches([source, Numbers(3)], context=8, batch=2, seed=0),
    ):
        with pytest.raises(ValueError, match=f"^{path}: line 2: "):
            list(batches)
        batches.close()
        assert list(batches) == []


@pytest.mark.slow
def test_the_end_of_the_process(tmp_path: Path) -> None:
    """While threads make batches of a script that has ended."""
    path = lines(tmp_path / "a", *[{"text": "word " * 400}] * 500)
    script = f"""
from rwkv_jax import data, tokenizers
source = data.JsonLines({str(path)!r}, tokenizers.load("bytes"))
batches = data.training_batches([source], context=256, batch=8, seed=0)
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.quick
@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context is 0; accepted is an integer from 1 on"),
        ({"batch": -1}, "batch is -1"),
        ({"sources": []}, r"the sources have \[\] documents"),
        ({"sources": [Numbers(2), Numbers(0)]}, r"the sources have \[2, 0\] documents"),
        ({"sources": Numbers(2)}, "sources is a Numbers; accepted is a list of sources"),
        ({"seed": 2**32}, "seed is 4294967296; accepted is an integer from 0 to 4294967295"),
        ({"sources": [Path("a.txt")]}, r"sources\[0\] is a PosixPath; accepted is a source"),
        ({"weights": [1, 2]}, r"weights is \[1, 2\]; accepted are 1 positive numbers"),
        ({"weights": [0]}, r"weights is \[0\]; accepted are 1 positive numbers"),
        ({"weights": [float("nan")]}, "weights is"),
    ],
)
def test_arguments_that_are_refused(change: Any, message: str) -> None:
    given = {"sources": [Numbers(2)], "context": 8, "batch": 1, "seed": 0} | change
    with pytest.raises((TypeError, ValueError), match=f"^training_batches: {message}"):
        data.training_batches(**given)


def test_documents_of_one_token(tmp_path: Path) -> None:
    path = bin_idx(tmp_path / "a", [[0], [1, 0], [0]], [0, 1, 2, 3])
    source = data.BinIdx(path, vocab_size=9)
    (batch,) = data.validation_batches([source], context=2, batch=1)
    assert batch.tokens.tolist() == [[1, 0]]
    bin_idx(path, [[0], [0]], [0, 1, 2])
    with pytest.raises(ValueError, match="no document of two tokens or more"):
        data.validation_batches([data.BinIdx(path, vocab_size=9)], context=2, batch=1)


def test_without_grain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rwkv_jax.data._pipeline", raising=False)
    monkeypatch.delattr(data, "_pipeline", raising=False)
    monkeypatch.setitem(sys.modules, "grain", None)
    with pytest.raises(ImportError, match=r"need the package grain: pip install 'rwkv-jax\[train"):
        data.validation_batches([Numbers(2)], context=8, batch=1)
