"""The commands `generate` and `chat`."""

import builtins
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import _commands, generation, models, serving, tokenizers
from rwkv_jax._commands import chat, interrupt, text_model
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.models import parameters

ANSWER = ["Assistant:", " fine", "!", "\n\n", "User:"]
STORY = ["Once", " upon", " a", " time"]
WORDS = [*dict.fromkeys([*ANSWER, *STORY]), *(chr(x) for x in range(128))]
BYTES = [bytes([x]) for x in range(128, 256)]


class Files(NamedTuple):
    """A model that continues `ANSWER` and `STORY` word by word, whatever was before, but nothing
    after "~", and its tokenizer."""

    model: str
    tokenizer: str

    def command(self, name: str, *options: str) -> list[str]:
        return [name, self.model, "--tokenizer", self.tokenizer, *options]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("model")
    lines = [f"{i} {word!r} {len(word)}\n" for i, word in enumerate([*WORDS, *BYTES], 1)]
    (folder / "words.txt").write_text("".join(lines))
    config = rwkv7.Config(num_layers=1, hidden_size=64, vocab_size=len(lines) + 1)
    # Blocks of zeros give nothing, so that this is a table of pairs of words.
    shapes = jax.eval_shape(lambda key: rwkv7.init(key, config), jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes)
    ones = rwkv7.Norm(jnp.ones(config.hidden_size), jnp.zeros(config.hidden_size))
    blocks = (params.blocks[0]._replace(ln0=ones),)
    words = np.random.default_rng(0).choice([-1.0, 1.0], (config.vocab_size, config.hidden_size))
    table = np.zeros_like(words)
    for chain in (ANSWER, STORY):
        for before, after in zip(chain, [*chain[1:], ""], strict=True):
            table[WORDS.index(after) + 1 if after else 0] += words[WORDS.index(before) + 1]
    words[WORDS.index("~") + 1] = np.nan
    emb, head = (rwkv7.Weight(jnp.asarray(x, jnp.float32)) for x in (words, table))
    models.save(folder / "model.pth", rwkv7.Params(emb, blocks, ln_out=ones, head=head))
    return Files(str(folder / "model.pth"), str(folder / "words.txt"))


COLD = ("--temperature", "0", "--presence", "0", "--frequency", "0")
HALF = ("--dtype", "bfloat16")


def test_generate(files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> tuple[str, str]:
        assert _commands.main(files.command("generate", *options)) == 0
        return capsys.readouterr()

    out, err = run("--prompt", "Once", *COLD, "--seed", "5")
    assert out == " upon a time\n"
    assert re.fullmatch(
        r"read 1 tokens in [\d.]+ s \([\d.]+ tokens/s\), wrote 3 tokens in [\d.]+ s \([\d.]+ "
        r"tokens/s\), after [\d.]+ s of compiling; seed 5; ended by: stop token\n",
        err,
    )
    (tmp_path / "prompt.txt").write_text("Assistant:")
    out, err = run("--prompt-file", str(tmp_path / "prompt.txt"), "--stop", "!\n", *COLD)
    assert out == " fine\n"
    assert err.endswith("ended by: stop string\n")
    out, err = run(
        "--prompt", "Assistant:", "--tokens", "2", "--batch", "2", "--seed", "8", *COLD, *HALF
    )
    assert out == "--- 1 of 2, seed 8\n fine!\n--- 2 of 2, seed 9\n fine!\n"
    assert err.endswith("ended by: length, length\n")


def test_states_of_generate(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text in two parts is the text in one, with random tokens and penalties."""

    def run(*options: str) -> str:
        sampling = ("--temperature", "20", "--top-p", "1")
        assert _commands.main(files.command("generate", *sampling, *options)) == 0
        return capsys.readouterr().out.removesuffix("\n")

    state = str(tmp_path / "state.safetensors")
    first = ("--prompt", "Once", "--seed", "3")
    whole = run(*first, "--tokens", "12")
    part = run(*first, "--tokens", "5", "--save-state", state)
    assert len(part) < len(whole)
    assert part + run("--load-state", state, "--tokens", "7") == whole
    assert run(*first, "--tokens", "0", "--save-state", state) == ""
    assert run("--load-state", state, "--tokens", "12") == whole


def test_what_generate_refuses(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    for options, message in (
        ((), "there is no text to continue"),
        (("--prompt", ""), "there is no text to continue"),
        (("--prompt-file", str(tmp_path / "latin.txt")), "no text in UTF-8"),
        (("--prompt", "x", "--top-p", "2"), "top_p is 2.0; accepted is a number from 0 to 1"),
        (("--prompt", "x", "--load-state", files.model), "header"),
    ):
        assert _commands.main(files.command("generate", *options)) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"^2$"):
        _commands.main(files.command("generate", "--prompt", "x", "--seed", "-1"))
    assert "argument --seed: '-1' is no integer from 0 to 2^31 - 1" in capsys.readouterr().err


def test_text_that_cannot_go_on(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state.safetensors"
    command = files.command("generate", "--prompt", "Once~", *COLD, "--save-state", str(state))
    assert _commands.main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        "rwkv-jax generate: generate: row 0: no token can be sampled after 0 new ones, because"
    )
    assert not state.exists()


class Typed:
    """What a user types, and what the model has read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.read: list[str] = []
        self.sessions: list[Any] = []
        self._patch, self._capsys = monkeypatch, capsys
        read = text_model.TextModel.read

        def recorded(model: Any, prompts: Sequence[str], *rest: Any, **options: Any) -> Any:
            self.read += prompts
            stream = read(model, prompts, *rest, **options)
            self.sessions.append(options["session"])
            return stream

        monkeypatch.setattr(text_model.TextModel, "read", recorded)

    def __call__(self, command: list[str], *lines: str | type[BaseException]) -> str:
        """The output of a command. The input ends after the lines."""
        left: Iterator[Any] = iter(lines)

        def typed(prompt: str) -> str:
            line = next(left, EOFError)
            if isinstance(line, str):
                return line
            raise line

        self.read.clear()
        self._patch.setattr(builtins, "input", typed)
        assert _commands.main(command) == 0
        return self._capsys.readouterr().out


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Typed:
    return Typed(monkeypatch, capsys)


def test_chat(files: Files, tmp_path: Path, typed: Typed) -> None:
    """The model reads each part of a conversation once, also over files."""
    path = str(tmp_path / "chat.safetensors")
    command = files.command("chat", *COLD)
    output = typed(
        *(command, "Hi", "", "two\\", "\\", "lines", "/retry", "/speed", f"/save {path}", "again"),
        *("/reset", "/retry", "new", "/load", f"/load {path}", "/load missing", "loaded"),
        *(KeyboardInterrupt, "/help", "/what", "/quit", "never"),
    )
    assert typed.read == [
        "User: Hi\n\nAssistant:",
        " two\nlines\n\nAssistant:",
        " two\nlines\n\nAssistant:",
        " again\n\nAssistant:",
        "User: new\n\nAssistant:",
        " loaded\n\nAssistant:",
    ]
    assert output.count("Assistant: fine!\n\n") == 6
    for message in (
        *("a new conversation\n", "there is no message to answer\n", "/load needs the name"),
        *("No such file", "tokens/s", "/retry      answer", "/what is unknown", "Ctrl-D ends"),
    ):
        assert message in output
    assert "/quit" in output.split("/what is unknown")[0]

    other = str(tmp_path / "other.safetensors")
    typed([*command, "--session", other], "Hi")
    typed([*command, "--session", other], "more")
    assert typed.read == [" more\n\nAssistant:"]
    typed([*command, "--session", other, "--tokens", "1"], "short")
    assert typed.read == [" short\n\nAssistant:", "\n\nUser:"]
    checkpoint = models.load(files.model)
    session = generation.load(other, checkpoint.module, checkpoint.params)
    turns = "User: Hi\n\nAssistant: fine!\n\nUser: more\n\nAssistant: fine!\n\nUser:"
    assert int(session.positions[0]) == len(split(turns + " short\n\nAssistant: fine\n\nUser:"))


def test_answers_that_fail(files: Files, tmp_path: Path, typed: Typed) -> None:
    """The conversation is as it was before, also for another try."""
    output = typed(
        *(files.command("chat", *COLD), "/save state.pth", "/save none/state.safetensors"),
        *("Hi", "~", "more", "~", "/retry", "~"),
    )
    assert "/save is state.pth; accepted is a file .safetensors\n" in output
    assert "/save is none/state.safetensors; accepted" in output
    assert (
        output.count("Assistant:\n\ngenerate: row 0: no token can be sampled after 0 new ones") == 3
    )
    assert typed.read == [
        "User: Hi\n\nAssistant:",
        " ~\n\nAssistant:",
        " more\n\nAssistant:",
        " ~\n\nAssistant:",
        " more\n\nAssistant:",
        " ~\n\nAssistant:",
    ]
    sizes = [0 if x is None else int(x.positions[0]) for x in typed.sessions]
    hi, more = (len(split(f"{x}\n\nAssistant: fine!\n\nUser:")) for x in ("User: Hi", " more"))
    assert sizes == [0, hi, hi, hi + more, hi, hi + more]


def split(text: str) -> list[str]:
    """The words of a text, of which the longest come first."""
    pattern = "|".join(map(re.escape, sorted(WORDS, key=len, reverse=True)))
    return re.findall(pattern, text)


def test_interrupted_answers(files: Files, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is kept, and the model reads the rest of what ends an answer."""
    handler = signal.getsignal(signal.SIGINT)
    step: Callable[..., Iterator[Any]] = text_model.TextModel.write
    stops = iter([1, 3, 0])

    def interrupted(model: Any, stream: Any, interrupt: Any) -> Iterator[Any]:
        at = next(stops)
        if at == 0:
            signal.raise_signal(signal.SIGINT)
        for number, texts in enumerate(step(model, stream, interrupt), 1):
            yield texts
            if number == at:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(text_model.TextModel, "write", interrupted)
    output = typed(files.command("chat", *COLD), "one", "two", "three")
    assert typed.read == [
        "User: one\n\nAssistant:",
        "\n\nUser: two\n\nAssistant:",
        "User: three\n\nAssistant:",
    ]
    assert output == "Assistant: fine\n\nAssistant: fine!\n\n\n\nAssistant:\n\n\n"
    assert signal.getsignal(signal.SIGINT) is handler
    positions = [int(x.positions[0]) for x in typed.sessions[1:]]
    assert positions == [
        len(split("User: one\n\nAssistant: fine")),
        len(split("User: one\n\nAssistant: fine\n\nUser: two\n\nAssistant: fine!\n\n")),
    ]


def test_a_second_interrupt() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with interrupt.Interrupt() as first:
        signal.raise_signal(signal.SIGINT)
        assert first.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize(
    ("seen", "unread"),
    [
        *(("yes", "\n\nUser:"), ("yes\n", "\nUser:"), ("yes\n\nUse", "r:"), ("", "\n\nUser:")),
        *(("yes\n\nUser:", ""), ("yes\n\nUser: x", ""), ("\n\n\n", "User:")),
    ],
)
def test_what_an_answer_leaves_unread(seen: str, unread: str) -> None:
    assert chat._unread(seen) == unread


def test_rows_that_end_well_are_printed(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """Of several rows one fails: some sample the word after which nothing can be sampled."""
    hot = ("--temperature", "100", "--top-p", "1", "--tokens", "400", "--seed", "0")
    command = files.command("generate", "--prompt", "Once", "--batch", "8", *hot)
    assert _commands.main(command) == 2
    out, err = capsys.readouterr()
    printed = [int(x) for x in re.findall(r"^--- (\d) of 8", out, re.MULTILINE)]
    assert 0 < len(printed) < 8
    (failed,) = re.findall(r"generate: row (\d): no token can be sampled", err)
    assert int(failed) + 1 not in printed
    assert "~" not in out


def test_an_initial_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, state = tmp_path / "model.safetensors", tmp_path / "state.safetensors"
    checkpoints.write_safetensors(model, checkpoints.rwkv7(vocabulary=256))
    params = models.load(model).params
    empty = rwkv7.initial_state(params, 1)
    rng = np.random.default_rng(1)
    tuned = jax.tree.map(
        lambda x: jnp.asarray(30 * rng.standard_normal(x.shape), x.dtype) if x.ndim == 4 else x,
        empty,
    )
    models.save_state(state, tuned)
    expected = generation.generate(
        *(rwkv7, params, [[65]], 20), sampling=generation.Sampling(temperature=0), state=tuned
    ).tokens[0]
    assert (
        expected
        != generation.generate(
            *(rwkv7, params, [[65]], 20), sampling=generation.Sampling(temperature=0)
        ).tokens[0]
    )
    command = ["generate", str(model), "--prompt", "A", "--tokens", "20", *COLD]
    assert _commands.main([*command, "--initial-state", str(state)]) == 0
    assert capsys.readouterr().out == bytes(expected).decode(errors="replace") + "\n"
    assert _commands.main([*command, "--initial-state", str(state), "--load-state", "x"]) == 2
    assert "--initial-state with --load-state; accepted is one" in capsys.readouterr().err


def test_a_tokenizer_with_fewer_tokens() -> None:
    """What it does not have is no text, in a stream and in a pool."""
    params = parameters(rwkv7)
    few = tokenizers.Tokenizer("few", 3, {1: b"a", 2: b"b"}, lambda text: [1])
    hot = generation.Sampling(temperature=5.0)
    stream = generation.TokenStream(rwkv7, params, [[1]], 30, sampling=hot)
    text = generation.TextStream(stream, few)
    for _ in text:
        pass
    (tokens,) = text.tokens
    assert max(tokens) > 2
    expected = "".join({1: "a", 2: "b"}.get(x, "") for x in tokens)
    assert text.texts == [expected]
    with serving.Pool(rwkv7, params, 1, tokenizer=few) as pool:
        request = pool.submit([1], 30, sampling=hot)
        assert "".join(request.texts()) == expected
