"""The commands `generate` and `chat`."""

import builtins
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import generation, models, tokenizers
from rwkv_jax._commands import interrupt, text_model
from rwkv_jax._commands.chat import Conversation
from rwkv_jax.chat import G1
from rwkv_jax.models import rwkv7
from support.commands import Command
from support.models import random_like, shapes_of
from support.vocabularies import write_vocabulary

ANSWER = ["Assistant:", " fine", "!", "\n\n", "User:"]
STORY = ["Once", " upon", " a", " time"]
WORDS = [*map(chr, range(256)), *(x for x in [*ANSWER, *STORY] if len(x) > 1)]
COLD = ("--temperature", "0", "--presence", "0", "--frequency", "0")


class Files(NamedTuple):
    """A model that continues `ANSWER` and `STORY` word by word, whatever was before, but nothing
    after "~", and its tokenizer."""

    model: str
    tokenizer: str

    def arguments(self, name: str, *options: object) -> list[str]:
        return [name, self.model, "--tokenizer", self.tokenizer, *map(str, options)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("model")
    vocabulary = write_vocabulary(folder / "words.txt", WORDS[256:])
    config = rwkv7.Config(num_layers=1, hidden_size=64, vocab_size=len(WORDS) + 1)
    # Blocks of zeros give nothing, so that this is a table of pairs of words.
    params = jax.tree.map(lambda x: jnp.zeros(x.shape), shapes_of(rwkv7, config))
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
    return Files(str(folder / "model.pth"), str(vocabulary))


def test_generate(files: Files, tmp_path: Path, command: Command) -> None:
    def run(*options: object) -> Any:
        return command(*files.arguments("generate", *options, *COLD))

    shown = run("--prompt", "Once", "--seed", 5)
    assert shown.out == " upon a time\n"
    assert re.fullmatch(
        r"read 1 tokens in [\d.]+ s \([\d.]+ tokens/s\), wrote 3 tokens in [\d.]+ s \([\d.]+ "
        r"tokens/s\), after [\d.]+ s of compiling; seed 5; ended by: stop token\n",
        shown.err,
    )
    (tmp_path / "prompt.txt").write_text("Assistant:")
    shown = run("--prompt-file", tmp_path / "prompt.txt", "--stop", "!\n")
    assert shown.out == " fine\n"
    assert shown.err.endswith("ended by: stop string\n")


def test_states_of_generate(files: Files, tmp_path: Path, command: Command) -> None:
    """A text in two parts is the text in one, with random tokens and penalties."""

    def run(*options: object) -> str:
        sampling = ("--temperature", 20, "--top-p", 1)
        return command(*files.arguments("generate", *sampling, *options)).out.removesuffix("\n")

    state = tmp_path / "state.safetensors"
    first = ("--prompt", "Once", "--seed", 3)
    whole = run(*first, "--tokens", 12)
    part = run(*first, "--tokens", 5, "--save-state", state)
    assert len(part) < len(whole)
    assert part + run("--load-state", state, "--tokens", 7) == whole
    assert run(*first, "--tokens", 0, "--save-state", state) == ""
    assert run("--load-state", state, "--tokens", 12) == whole


def test_what_generate_refuses(
    files: Files, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    state = tmp_path / "state.safetensors"
    stuck = "generate: row 0: no token can be sampled after 0 new ones, because"
    for options, message in (
        ((), "there is no text to continue"),
        (("--prompt", ""), "there is no text to continue"),
        (("--prompt-file", tmp_path / "latin.txt"), "no text in UTF-8"),
        (("--prompt", "x", "--top-p", 2), "top_p is 2.0; accepted is a number from 0 to 1"),
        (("--prompt", "x", "--load-state", files.model), "header"),
        (("--prompt", "Once~", *COLD, "--save-state", state), stuck),
    ):
        assert message in command.refused(*files.arguments("generate", *options))
    assert not state.exists()
    with pytest.raises(SystemExit, match=r"^2$"):
        command(*files.arguments("generate", "--prompt", "x", "--seed", -1))
    assert "argument --seed: '-1' is no integer from 0 to 2^31 - 1" in capsys.readouterr().err


class Typed:
    """What a user types, and what the model has read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, command: Command):
        self.read: list[str] = []
        self.sessions: list[Any] = []
        self._patch, self._command = monkeypatch, command
        read = text_model.TextModel.read

        def recorded(model: Any, prompts: Sequence[str], *rest: Any, **options: Any) -> Any:
            self.read += prompts
            stream = read(model, prompts, *rest, **options)
            self.sessions.append(options["session"])
            return stream

        monkeypatch.setattr(text_model.TextModel, "read", recorded)

    def __call__(self, arguments: list[str], *lines: str | type[BaseException]) -> str:
        """The output of a command. The input ends after the lines."""
        self.read.clear()
        self._patch.setattr(builtins, "input", Mock(side_effect=[*lines, EOFError]))
        return self._command(*arguments).out


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, command: Command) -> Typed:
    return Typed(monkeypatch, command)


def test_chat(files: Files, tmp_path: Path, typed: Typed) -> None:
    """The model reads each part of a conversation once, also over files."""
    path = str(tmp_path / "chat.safetensors")
    chat = files.arguments("chat", *COLD)
    output = typed(
        *(chat, "Hi", "", "two\\", "\\", "lines", "/retry", "/speed", f"/save {path}", "again"),
        *("/reset", "/retry", "new", "/load", f"/load {path}", "/load missing", "loaded"),
        *(KeyboardInterrupt, "/help", "/what", "/quit", "never"),
    )
    messages = ["User: Hi", *[" two\nlines"] * 2, " again", "User: new", " loaded"]
    assert typed.read == [f"{message}\n\nAssistant:" for message in messages]
    assert output.count("Assistant: fine!\n\n") == 6
    for message in (
        *("a new conversation\n", "there is no message to answer\n", "/load needs the name"),
        *("No such file", "tokens/s", "/retry      answer", "/what is unknown", "Ctrl-D ends"),
    ):
        assert message in output
    assert "/quit" in output.split("/what is unknown")[0]

    other = str(tmp_path / "other.safetensors")
    typed([*chat, "--session", other], "Hi")
    typed([*chat, "--session", other], "more")
    assert typed.read == [" more\n\nAssistant:"]
    typed([*chat, "--session", other, "--tokens", "1"], "short")
    assert typed.read == [" short\n\nAssistant:", "\n\nUser:"]
    checkpoint = models.load(files.model)
    session = generation.load(other, checkpoint.module, checkpoint.params)
    turns = "User: Hi\n\nAssistant: fine!\n\nUser: more\n\nAssistant: fine!\n\nUser:"
    assert int(session.positions[0]) == len(split(turns + " short\n\nAssistant: fine\n\nUser:"))


def test_answers_that_fail(files: Files, tmp_path: Path, typed: Typed) -> None:
    """The conversation is as it was before, also for another try."""
    output = typed(
        *(files.arguments("chat", *COLD), "/save state.pth", "/save none/state.safetensors"),
        *("Hi", "~", "more", "~", "/retry", "~"),
    )
    assert "/save is state.pth; accepted is a file .safetensors\n" in output
    assert "/save is none/state.safetensors; accepted" in output
    assert (
        output.count("Assistant:\n\ngenerate: row 0: no token can be sampled after 0 new ones") == 3
    )
    messages = ["User: Hi", " ~", " more", " ~", " more", " ~"]
    assert typed.read == [f"{message}\n\nAssistant:" for message in messages]
    sizes = [0 if x is None else int(x.positions[0]) for x in typed.sessions]
    hi, more = (len(split(f"{x}\n\nAssistant: fine!\n\nUser:")) for x in ("User: Hi", " more"))
    assert sizes == [0, hi, hi, hi + more, hi, hi + more]


@pytest.mark.usefixtures("unchecked_types")
def test_formats_of_chat(files: Files, tmp_path: Path, typed: Typed, command: Command) -> None:
    """What the model is told first, thoughts, and what are no tools."""
    chat = files.arguments("chat", *COLD)
    assert "/tool needs --tools\n" in typed([*chat], "/tool 1")
    typed([*chat, "--system", "Be\n\nbrief."], "Hi", "more", "/reset", "new")
    assert typed.read == [
        *("System: Be\nbrief.\n\nUser: Hi\n\nAssistant:", " more\n\nAssistant:"),
        "System: Be\nbrief.\n\nUser: new\n\nAssistant:",
    ]
    assert "Assistant: <think" in typed([*chat, "--think", "short"], "Hi")
    assert typed.read == ["User: Hi (think a bit)\n\nAssistant: <think"]
    refused = {"{": "no valid JSON", "[]": "no JSON list", "[1]": "tool 1 is 1"}
    for content, message in refused.items():
        (tmp_path / "tools.json").write_text(content)
        assert message in command.refused(*chat, "--tools", str(tmp_path / "tools.json"))


class Scripted:
    """In place of a model, what it writes, and what it has read beyond that."""

    speed = "fast"

    def __init__(self, *answers: tuple[str, str]):
        self._answers, self.read_after = iter(answers), []

    def read(self, prompts: list[str], length: int, *, session: Any, **_: Any) -> Any:
        text, rest = next(self._answers) if length else ("", "")
        self.read_after.append((session, prompts[0]))
        return SimpleNamespace(texts=[text], rests=[rest], session=len(self.read_after))

    def write(self, stream: Any, _: Any) -> Iterator[list[str]]:
        yield stream.texts


@pytest.mark.usefixtures("unchecked_types")
def test_results_of_tools(capsys: pytest.CaptureFixture[str]) -> None:
    """The model reads a call again if it has read the beginning of a question after it."""
    model: Any = Scripted((">\ncall", "\n### User"), (">\n", "\n### Tool"), (">\nyes", ""))
    form = G1(tools=[{"name": "f"}], think="on")
    conversation = Conversation(model, form, "", 9, 0)
    conversation.say("Hi")
    for command in (("/tool", "[1]"), ("/tool", "text"), ("/tool", "")):
        shown = conversation.command(*command)
    assert shown == "/tool needs a result"
    assert capsys.readouterr().out.startswith("Assistant: <think>\ncall\n\n")
    first = "### System\n### `f`\n**Parameters:**\n```json\n{}\n```\n### User"
    begun = "\n### Assistant\n<think"
    output = "\n### Tool Output\n```json\n%s\n```" + begun
    assert model.read_after == [
        (None, f"{first}\nHi{begun}"),
        (None, f"{first}\nHi{begun}>\ncall" + output % "[\n  1\n]"),
        (2, (output % '"text"').removeprefix("\n### Tool")),
    ]


def test_chat_with_a_template(files: Files, tmp_path: Path, typed: Typed, command: Command) -> None:
    """That of the folder of the model. Where it changes earlier messages they are read again."""
    pytest.importorskip("jinja2")
    folder = tmp_path / "folder"
    folder.mkdir()
    models.save(folder / "model.pth", models.load(files.model).params)
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '!' if not loop.last }}\n\n"
        "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    chat = files._replace(model=str(folder)).arguments("chat", *COLD)
    output = typed(chat, "Hi", "more", "/save x.safetensors", "/load x.safetensors")
    hi = "user: Hi!\n\nassistant: fine!\n\nUser:!\n\nuser: more\n\nAssistant:"
    assert typed.read == ["user: Hi\n\nAssistant:", hi]
    assert output.count("there are no files of its conversations; accepted is --template none") == 2
    typed([*chat, "--template", "none"], "Hi")
    assert typed.read == ["User: Hi\n\nAssistant:"]
    error = command.refused(*chat, "--session", "x.safetensors")
    assert "--session with a template; accepted is --template none" in error


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
    output = typed(files.arguments("chat", *COLD), "one", "two", "three")
    messages = ["User: one", "\n\nUser: two", "User: three"]
    assert typed.read == [f"{message}\n\nAssistant:" for message in messages]
    assert output == "Assistant: fine\n\nAssistant: fine!\n\n\n\nAssistant:\n\n\n"
    assert signal.getsignal(signal.SIGINT) is handler
    positions = [int(x.positions[0]) for x in typed.sessions[1:]]
    one, two = "User: one\n\nAssistant: fine", "\n\nUser: two\n\nAssistant: fine!\n\n"
    assert positions == [len(split(one)), len(split(one + two))]


def test_a_second_interrupt() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with interrupt.Interrupt() as first:
        signal.raise_signal(signal.SIGINT)
        assert first.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.slow
def test_rows(files: Files, command: Command) -> None:
    """Those that end well are printed, where others sample the word after which nothing can be
    sampled."""
    arguments = files.arguments("generate", "--prompt", "Assistant:", "--tokens", 2, *COLD)
    shown = command(*arguments, "--batch", 2, "--seed", 8, "--dtype", "bfloat16")
    assert shown.out == "--- 1 of 2, seed 8\n fine!\n--- 2 of 2, seed 9\n fine!\n"
    assert shown.err.endswith("ended by: length, length\n")
    hot = ("--temperature", 100, "--top-p", 1, "--tokens", 400, "--seed", 0)
    arguments = files.arguments("generate", "--prompt", "Once", "--batch", 8, *hot)
    out, err = command(*arguments, code=2)
    printed = [int(x) for x in re.findall(r"^--- (\d) of 8", out, re.MULTILINE)]
    assert 0 < len(printed) < 8
    (failed,) = re.findall(r"generate: row (\d): no token can be sampled", err)
    assert int(failed) + 1 not in printed
    assert "~" not in out


def test_an_initial_state(files: Files, tmp_path: Path, command: Command) -> None:
    params = random_like(models.load(files.model).params)
    model, state = tmp_path / "model.safetensors", tmp_path / "state.safetensors"
    models.save(model, params)
    empty = rwkv7.initial_state(params, 1)
    tuned = jax.tree.map(lambda x, y: y if x.ndim == 4 else x, empty, random_like(empty, 1.0))
    models.save_state(state, tuned)
    prompt, greedy = [[WORDS.index("D") + 1]], generation.Sampling(temperature=0)
    expected, other = (
        generation.generate(rwkv7, params, prompt, 20, sampling=greedy, state=x).tokens[0]
        for x in (tuned, None)
    )
    assert expected != other
    arguments = files._replace(model=str(model)).arguments(
        *("generate", "--prompt", "D", "--tokens", 20, *COLD)
    )
    shown = command(*arguments, "--initial-state", state)
    assert shown.out == tokenizers.load(files.tokenizer).decode(expected) + "\n"
    error = command.refused(*arguments, "--initial-state", state, "--load-state", "x")
    assert "--initial-state with --load-state; accepted is one" in error
