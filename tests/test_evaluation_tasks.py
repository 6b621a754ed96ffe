"""LAMBADA and passkeys, in `rwkv_jax.evaluation` and as commands, and the files that they read."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rwkv_jax import evaluation, models, tokenizers
from rwkv_jax.evaluation import _lambada, _passkey
from rwkv_jax.evaluation._continuations import Continuation
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.commands import Command
from support.models import predicted
from support.vocabularies import write_vocabulary

WORDS = (" time", " a", "Once")
PASSAGES = ("Once upon a time", "a tale\n of\n\nOnce é", "Once  a")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random numbers that always goes on with the first word, its tokenizer and some
    passages."""
    folder = tmp_path_factory.mktemp("model")
    write_vocabulary(folder / "words.txt", WORDS)
    tensors = checkpoints.rwkv7(layers=1, vocabulary=257 + len(WORDS))
    tensors["head.weight"][257] = 10 * tensors["ln_out.bias"]
    checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    lines = [json.dumps({"text": text, "other": 1}) + "\n" for text in PASSAGES]
    (folder / "passages.jsonl").write_text("\n".join(lines))
    return folder


def test_lambada(folder: Path, command: Command) -> None:
    """By the formulas: the last word is encoded alone, after the token 0 and the rest."""
    params = models.load(folder / "model.safetensors").params
    tokenizer = tokenizers.load(folder / "words.txt", 257 + len(WORDS))
    passages = evaluation.read_lambada(folder / "passages.jsonl")
    assert passages == [
        *(("Once upon a", " time"), ("a tale\n of\n\nOnce", " é"), ("Once ", " a")),
    ]
    losses, right = [], []
    for before, word in passages:
        source, last = [0, *tokenizer.encode(before)], tokenizer.encode(word)
        log_probs, greedy = predicted(rwkv7, params, source + last)
        losses.append(-log_probs[len(source) - 1 :].sum())
        right.append(greedy[len(source) - 1 :].all())
    found = evaluation.lambada(rwkv7, params, tokenizer, passages, batch=2, chunk_size=8)
    assert found.passages == 3
    assert found.accuracy == np.mean(right) == 1 / 3
    perplexity = pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    assert found.perplexity == perplexity
    model = ["eval", folder / "model.safetensors", "--tokenizer", folder / "words.txt"]
    shown = json.loads(command(*model, "--lambada", folder / "passages.jsonl", "--json").out)
    assert shown["accuracy"] == found.accuracy
    assert shown["perplexity"] == pytest.approx(found.perplexity, rel=1e-4)
    rows = command.table(*model, "--lambada", folder / "passages.jsonl")
    assert (rows["passages"], rows["accuracy"]) == ("3", f"{found.accuracy:.5g}")

    _, state = rwkv7.apply(params, np.array([[5, 6, 7]]))
    models.save_state(folder / "state.pth", state)
    state = models.load_state(folder / "state.pth", params)
    found = evaluation.lambada(rwkv7, params, tokenizer, passages, state=state)
    line = (*model, "--lambada", folder / "passages.jsonl")
    shown = json.loads(command(*line, "--initial-state", folder / "state.pth", "--json").out)
    assert shown["perplexity"] == pytest.approx(found.perplexity, rel=1e-4) != perplexity


def test_accuracy_and_perplexity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A passage counts as right if all tokens of its last word are, and its tokens count as one."""
    given = iter([Continuation(-2.0, True), Continuation(-1.0, False), Continuation(-3.0, True)])
    monkeypatch.setattr(_lambada, "continuations", lambda *_, **__: list(given))
    letters = tokenizers.load("bytes")
    found = evaluation.lambada(rwkv7, None, letters, [("x", " y")] * 3)
    assert found == (3, 2 / 3, pytest.approx(math.exp(2)))
    given = iter([Continuation(-1e4, False)])
    assert evaluation.lambada(rwkv7, None, letters, [("x", " y")]).perplexity == math.inf
    for passages in ([], [("", " y")], [("x", "")]):
        with pytest.raises(ValueError, match="lambada: accepted are passages, with two texts"):
            evaluation.lambada(rwkv7, None, letters, passages)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a b"}\n\n{"text": "a b"\n', "line 3: the line is no JSON: "),
        (b'{"text": "a b"}\n\xff\n', "line 2: the line is no JSON: "),
        (b"[" * 100_000, "line 1: the line is no JSON: "),
        (b'["a b"]', 'line 1: accepted is {"text": ...} with a text that is not empty'),
        (b'{"text": "a b"}\n{"tekst": "a b"}', "line 2: accepted is"),
        (b'{"text": ["a b"]}', "line 1: accepted is"),
        (b'{"text": ""}', "line 1: accepted is"),
        (b'{"text": "a \\ud800"}', "line 1: the text is no Unicode: "),
        (b'{"text": "word"}', "line 1: the text is 'word'; accepted is a text with a space before"),
        (b'{"text": "a b "}', "line 1: the text is 'a b '; accepted is a text with a space before"),
        (b'{"text": " word"}', "line 1: the text is ' word'; accepted is a text with a space"),
        (b"\n", "passages.jsonl: the file has no texts"),
    ],
)
def test_files_that_are_refused(
    content: bytes, message: str, tmp_path: Path, command: Command
) -> None:
    """In one line, before the model is loaded."""
    path = tmp_path / "passages.jsonl"
    path.write_bytes(content)
    error = command.refused("eval", "no.pth", "--lambada", path)
    assert error.startswith(f"rwkv-jax eval: {path}: ")
    assert message in error
    assert error.count("\n") == 1


def test_passkeys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the texts have and where, that lengths are kept, and how the figures come about. Another
    seed makes other texts."""
    letters, given = tokenizers.load("bytes"), list[Any]()

    def found_early(module: Any, params: Any, pairs: Any, **options: Any) -> list[Continuation]:
        """A model that finds what is in the first half."""
        given.append([(bytes(x).decode(), bytes(y).decode()) for x, y in pairs])
        where = [text.index(number) / len(text) for text, number in given[-1]]
        return [Continuation(-1.0 - x, x < 0.5) for x in where]

    monkeypatch.setattr(_passkey, "continuations", found_early)
    options: Any = {"depths": (0, 0.4, 1), "samples": 3}
    found = evaluation.passkey(rwkv7, None, letters, (1000, 3000), **options)
    assert [(x.length, x.depth, x.texts, x.accuracy) for x in found] == [
        *((1000, 0, 3, 1), (1000, 0.4, 3, 1), (1000, 1, 3, 0)),
        *((3000, 0, 3, 1), (3000, 0.4, 3, 1), (3000, 1, 3, 0)),
    ]
    longest = max(map(len, _passkey._FILLER))
    for i, (text, number) in enumerate(given[0]):
        length, depth = (1000, 3000)[i // 9], options["depths"][i // 3 % 3]
        assert length - longest <= len(text + number) <= length
        assert text.count(number) == 2
        assert text.endswith("The secret number is")
        assert abs(text.index(number) / length - depth) < 0.2
        assert found[i // 3].log_prob == pytest.approx(-1 - depth, abs=0.2)
    assert len({number for _, number in given[0]}) == 18
    evaluation.passkey(rwkv7, None, letters, (1000, 3000), **options)
    evaluation.passkey(rwkv7, None, letters, (1000, 3000), seed=1, **options)
    assert given[0] == given[1] != given[2]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ((100,), {}, "passkey: a length is 100; accepted is an integer from 190 on"),
        ((), {}, "passkey: lengths is (); accepted are lengths"),
        ((500,), {"depths": (0, 1.5)}, "passkey: depths is (0, 1.5); accepted are depths from 0"),
        ((500,), {"samples": 0}, "passkey: samples is 0; accepted is an integer from 1 on"),
    ],
)
@pytest.mark.usefixtures("unchecked_types")
def test_passkeys_that_are_refused(lengths: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluation.passkey(rwkv7, None, tokenizers.load("bytes"), lengths, **options)


def test_passkeys_as_a_command(folder: Path, command: Command) -> None:
    model = ["eval", folder / "model.safetensors", "--tokenizer", folder / "words.txt"]
    options = ["--passkey", 220, 250, "--samples", 1, "--seed", 3, "--batch", 4]
    found = json.loads(command(*model, *options, "--json").out)
    assert found["passkey"] == [220, 250]
    assert [(x["length"], x["depth"]) for x in found["results"]] == [
        (length, depth) for length in (220, 250) for depth in (0, 0.25, 0.5, 0.75, 1)
    ]
    rows = [line.split() for line in command(*model, *options).out.splitlines()[-10:]]
    for row, x in zip(rows, found["results"], strict=True):
        assert float(row[-1]) == pytest.approx(x["log_prob"], abs=1e-4)


def test_options_of_another_way_to_evaluate(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, message in (
        (("--lambada", "x", "--context", 5), "--context needs --text"),
        (("--text", "x", "--samples", 5), "--samples needs --passkey"),
        (("--text", "x", "--include-path", "."), "--include-path needs --tasks"),
    ):
        assert message in command.refused("eval", "no.pth", *options)
    for options in ((), ("--text", "x", "--tasks", "y")):
        with pytest.raises(SystemExit, match=r"^2$"):
            command("eval", "no.pth", *options)
    assert "not allowed with argument --text" in capsys.readouterr().err
