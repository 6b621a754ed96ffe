"""`rwkv-jax train` with a model and data of the user: what it trains, and what it writes."""

import contextlib
import functools
import importlib
import json
import re
import shlex
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import _commands, chat, finetuning, models
from rwkv_jax.data import write_bin_idx
from rwkv_jax.models import rwkv7
from support import checkpoints, memory
from support.commands import Command
from support.models import random_like, shapes_of
from support.scripts import AtStep

TEXT = "to be or not to be\n"
CONFIG = rwkv7.Config(num_layers=1, hidden_size=32, head_size=16, vocab_size=256)

interrupt = functools.partial(signal.raise_signal, signal.SIGINT)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random numbers in bfloat16, whose states decay slowly and matter."""
    path = tmp_path_factory.mktemp("base") / "model.safetensors"

    def lasting(at: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(at, simple=True, separator=".")
        x = x - 8 if name.endswith("att.w0") else x
        scale = {"blocks.0.att.key.weight": 0.1, "blocks.0.att.output.weight": 4}.get(name, 1)
        return (x * scale).astype(jnp.bfloat16)

    params = random_like(shapes_of(rwkv7, CONFIG), 0.5)
    models.save(path, jax.tree_util.tree_map_with_path(lasting, params))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, conversations and tokens."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("eeeeeeee")
    write_bin_idx(folder / "tokens", [[*range(i, i + 9), 0] for i in range(40)])
    with (folder / "texts.jsonl").open("w") as file:
        for i in range(40):
            file.write(json.dumps({"text": TEXT[: 4 + i % 16]}) + "\n")
    (folder / "talks.jsonl").write_text(
        "".join(
            json.dumps({"messages": [said("user", f"{i}?"), said("assistant", "yes")]}) + "\n"
            for i in range(40)
        )
    )
    return folder


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


Run: TypeAlias = Callable[..., int]


@pytest.fixture
def run(train: ModuleType, base: Path, tmp_path: Path) -> Run:
    """The command, with the options that all runs here have."""
    sizes = ["--batch=2", "--context=24", "--warmup=1", "--sample=4", "--cache=none"]

    def run(*options: str, out: Path = tmp_path / "out") -> int:
        return _commands.main(["train", f"--model={base}", f"--out={out}", *sizes, *options])

    return run


def log(out: Path) -> dict[str, Any]:
    return json.loads((out / "log.json").read_text())


LEARNED = {
    "both": ["--train=lora,states", "--learning-rate=0.02", "--states-learning-rate=0.1"],
    "dora, int8": ["--train=lora", "--dora", "--base=int8", "--learning-rate=0.02"],
    "pattern": ["--train=blocks.0.ffn.*", "--learning-rate=0.02"],
}


@pytest.mark.parametrize("name", LEARNED)
def test_learning(
    run: Run, train: ModuleType, base: Path, folder: Path, tmp_path: Path, name: str, capsys: Any
) -> None:
    """A text is learned by what is trained alone. Its loss is also that of the model that the
    printed command reads."""
    text = folder / "text.txt"
    options = [*LEARNED[name], f"--data={text}", f"--validation={text}", "--steps=120"]
    before = train.parts.load(train.options.parse([f"--model={base}", *options]), _mesh(train))[0]
    assert run(*options, "--eval-every=120", "--save-every=120") == 0
    output = capsys.readouterr().out
    losses = log(tmp_path / "out")
    assert losses["held_out"][-1][1] < losses["train"][0] / 2
    (line,) = [x for x in output.splitlines() if x.startswith("Continue a text: ")]
    words = shlex.split(line.partition(": ")[2])
    assert words[:2] == ["rwkv-jax", "generate"]
    assert _commands.main([*words[1:], "--tokens", "3"]) == 0
    reads = words[2 : words.index("--prompt")]
    capsys.readouterr()
    assert _commands.main(["eval", *reads, "--text", str(text), "--json"]) == 0
    loss = json.loads(capsys.readouterr().out)["loss"]
    # The base of the command is not int8.
    assert loss == pytest.approx(losses["held_out"][-1][1], rel=0.1 if "int8" in name else 1e-3)
    if "dora" in name:
        assert finetuning.load_adapter(tmp_path / "out" / "adapter", before.params).dora
    if name == "pattern":
        new = rwkv7.names(models.load(reads[0]).params)
        for given, x in rwkv7.names(before.params).items():
            assert np.array_equal(x, new[given]) == (not given.startswith("blocks.0.ffn.")), given


def _mesh(train: ModuleType) -> Any:
    return train.devices.make_mesh(None, CONFIG, batch=2, context=24)


@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8"])
def test_base_of_another_dtype(train: ModuleType, tmp_path: Path, base_dtype: str) -> None:
    """The file is read in that dtype: the devices never have all of it as it is in the file. What
    is trained is not rounded."""
    path = checkpoints.write_model(tmp_path, vocabulary=256)
    whole = models.load(path).params
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), whole)
    expected = models.quantize(whole) if base_dtype == "int8" else rounded

    def load(trained: str) -> Any:
        options = [f"--model={path}", f"--train={trained}", f"--base={base_dtype}"]
        return train.parts.load(train.options.parse(options), _mesh(train))[0]

    parts, most = memory.peak(lambda: load("states"))
    jax.tree.map(np.testing.assert_array_equal, parts.params, expected)
    largest = max(x.nbytes for x in jax.tree.leaves(whole))
    assert most <= sum(x.nbytes for x in jax.tree.leaves(parts)) + largest
    if base_dtype != "int8":
        params = load("head.weight").params
        jax.tree.map(np.testing.assert_array_equal, params, rounded._replace(head=whole.head))


@pytest.mark.parametrize("base_dtype", ["bfloat16", "int8"])
def test_what_is_frozen_stays(train: ModuleType, base: Path, folder: Path, base_dtype: str) -> None:
    """After steps it has the same bits, and the optimizer has no moments for it, nor an average.
    The next step finds the adapter in the dtype of the activations."""
    sizes = ["--batch=2", "--dtype=bfloat16", "--ema=0.5"]
    args = train.options.parse(
        [f"--model={base}", "--train=lora,states", f"--base={base_dtype}", *sizes]
    )
    model, parts = train.prepare(args)
    steps = train.loop.steps
    optimizer = train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    expected = jax.tree.map(np.array, parts.params)
    state = steps.initial_state(model, optimizer, shapes, seed=0, initial=parts)
    step = steps.train_step(model, optimizer, shapes, 0.0)
    rows = np.arange(2 * 17, dtype=np.int32).reshape(2, 17)
    for _ in range(2):
        state, _ = step(state, train.data.windows(rows))
    jax.tree.map(np.testing.assert_array_equal, state.frozen.params, expected)
    assert jax.tree.leaves(state.params.params) == jax.tree.leaves(state.copies.params) == []
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state.params.adapter)
    jax.tree.map(np.testing.assert_array_equal, state.copies.adapter, rounded)
    of_moments = sum(x.size for x in jax.tree.leaves(state.optimizer) if x.ndim)
    assert of_moments == 3 * sum(x.size for x in jax.tree.leaves(state.params))
    whole, average = train.loop._results(state)
    for name in ("adapter", "states"):
        x, y = (jax.tree.leaves(getattr(found, name)) for found in (whole, average))
        assert all(map(np.all, map(np.isfinite, y)))
        assert not all(map(np.array_equal, x, y))


def test_packed_rows_are_rows_of_a_document_each(
    train: ModuleType, base: Path, folder: Path
) -> None:
    """In loss and gradients, also of rows that are read in pieces."""
    given = [f"--model={base}", "--context=40", f"--data={folder / 'texts.jsonl'}"]
    args = train.options.parse([*given, f"--validation={folder / 'texts.jsonl'}"])
    model, parts = train.prepare(args)
    found = []
    for packed, piece in ((True, None), (False, None), (True, 8)):
        source = train.documents.Documents(args, 256, packed=packed)
        batch = jax.tree.map(jnp.asarray, source.held_out)
        source.close()
        loss = functools.partial(train.language_model.mean_loss, model._replace(piece=piece))
        found.append((len(batch.tokens), jax.jit(jax.value_and_grad(loss))(parts, batch)))
    (rows, together), (documents, apart), (_, in_pieces) = found
    assert rows < documents == 40
    for x, y, z in zip(*map(jax.tree.leaves, (together, apart, in_pieces)), strict=True):
        assert np.linalg.norm(x - y) <= 1e-5 * np.linalg.norm(y)
        assert np.linalg.norm(z - y) <= 1e-5 * np.linalg.norm(y)


def test_large_files_stay_on_the_disk(train: ModuleType, tmp_path: Path) -> None:
    """Tokens of a document, and a text, which have nothing that separates documents."""
    size = 2**22
    write_bin_idx(tmp_path / "tokens", [np.arange(size) % 251])
    (tmp_path / "text.txt").write_text("a text\n" * (size // 6))
    for name in ("tokens.bin", "text.txt"):
        args = train.options.parse([f"--data={tmp_path / name}", "--eval-tokens=4096"])
        tracemalloc.start()
        with contextlib.closing(train.documents.Documents(args, 256, packed=True)) as source:
            batch = source.batch(0)
            _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2 * size
        assert batch.mask.mean() > 0.8
        begin = source.held_out.tokens[0, :7].tolist()
        if source.tokens is None:
            assert begin == list(b"a text\n")
        else:
            assert source.tokens == round(0.95 * size)
            assert begin == [(source.tokens + i) % 251 for i in range(7)]


def test_places_of_a_batch(train: ModuleType, tmp_path: Path) -> None:
    """Of lines, of documents of tokens, and of few documents, in files of a folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    words = [f"<{i}>" for i in range(65)]
    for name, part in (("a.jsonl", words[:20]), ("b.jsonl", words[20:40])):
        (folder / name).write_text("".join(json.dumps({"text": x}) + "\n" for x in part))
    write_bin_idx(tmp_path / "tokens", [[*x.encode(), 0] for x in words[40:63]])
    (folder / "a.txt").write_text(words[63])
    (tmp_path / "b.txt").write_text(words[64])
    given = [folder, tmp_path / "tokens.bin", tmp_path / "b.txt"]
    options = ["--pattern=*", "--context=8", "--batch=3", f"--validation={tmp_path / 'b.txt'}"]
    args = train.options.parse([*(f"--data={x}" for x in given), *options])
    expected = [
        f"{folder / name}: line {i}" for name in ("a.jsonl", "b.jsonl") for i in range(1, 21)
    ]
    expected += [f"{tmp_path / 'tokens.bin'}: document {i}" for i in range(23)]
    expected += [f"{folder / 'a.txt'}: line 1", f"{tmp_path / 'b.txt'}: line 1"]
    with contextlib.closing(train.documents.Documents(args, 256, packed=True)) as source:
        batches = [source.batch(step).tokens.astype(np.uint8).tobytes() for step in range(9)]
        for step in (4, 8):
            found = {int(x) for x in re.findall(b"<([0-9]+)", batches[step])}
            assert {expected.index(x) for x in source.places(step).split(", ")} == found
            assert max(found) == 64
            assert min(found) < 40
            assert found & {*range(40, 63)}


@pytest.mark.slow
def test_resume_within_documents(run: Run, folder: Path, tmp_path: Path, at_step: AtStep) -> None:
    """Of several files with weights, and with dropout."""
    files = {"texts.jsonl": 2, "talks.jsonl": 1, "tokens.bin": 0.5}
    data = [f"--data={folder / name}={weight}" for name, weight in files.items()]
    options = [*data, "--train=lora,states", "--lora-dropout=0.5", "--steps=6", "--save-every=2"]
    options += ["--dora", "--ema=0.5"]
    at_step(3, interrupt)
    assert run(*options, out=tmp_path / "parts") == 130
    at_step(-1, interrupt)
    assert run(*options, "--resume", out=tmp_path / "parts") == 0
    assert run(*options, out=tmp_path / "whole") == 0
    parts, whole = log(tmp_path / "parts"), log(tmp_path / "whole")
    assert parts == whole
    assert len(set(parts["train"])) == 6
    adapters = [
        finetuning.load_adapter(tmp_path / name / "ema-adapter", shapes_of(rwkv7, CONFIG))
        for name in ("parts", "whole")
    ]
    jax.tree.map(np.testing.assert_array_equal, *adapters)


def test_stale_results(train: ModuleType, base: Path, tmp_path: Path) -> None:
    """A run removes what an earlier one has written and it does not, but not its base."""
    others = "ema-adapter/adapter_config.json", "ema-state.pth", "adapter/adapter_config.json"
    for name in ("model.safetensors", "state.pth", *others):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("of an earlier run")
    _, parts = train.prepare(train.options.parse([f"--model={base}", "--train=states"]))
    model = tmp_path / "model.safetensors"
    kept = {"model.safetensors", "state.pth"}
    for given, names in ((model, kept), (tmp_path, kept), (base, {"state.pth"})):
        options = [f"--model={given}", "--train=states", f"--out={tmp_path}"]
        train.outputs.save(train.options.parse(options), parts, None)
        assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("trained", ["lora", "lora,ln_out.*"])
def test_base_of_an_adapter(train: ModuleType, base: Path, tmp_path: Path, trained: str) -> None:
    """PEFT finds the parameters that the adapter was trained with."""
    options = [f"--model={base}", f"--train={trained}", f"--out={tmp_path}", "--ema=0.5"]
    args = train.options.parse(options)
    _, parts = train.prepare(args)
    train.outputs.save(args, parts, parts)
    for name, model in (("adapter", "model.safetensors"), ("ema-adapter", "ema.safetensors")):
        found = json.loads((tmp_path / name / "adapter_config.json").read_text())
        expected = base if trained == "lora" else tmp_path / model
        assert found["base_model_name_or_path"] == str(expected)


def test_tools(train: ModuleType, tmp_path: Path) -> None:
    path, tools = tmp_path / "tools.json", [{"name": "f"}]
    path.write_text(json.dumps(tools))
    conversations = importlib.import_module("rwkv_jax._training.conversations")
    form = conversations.form(train.options.parse([f"--tools={path}"]))
    assert form.stop == chat.G1(tools=tools).stop
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"tools\.json: the file is no JSON list of functions"):
        conversations.form(train.options.parse([f"--tools={path}"]))


def test_results_of_a_folder(
    train: ModuleType, base: Path, tmp_path: Path, command: Command, monkeypatch: Any
) -> None:
    """They are folders too, also where the first block has no `ln0`, which no file can have. The
    format of conversations goes with them."""
    monkeypatch.chdir(tmp_path)
    params = models.load(base).params
    first = params.blocks[0]._replace(ln0=None)
    models.save("base", params._replace(blocks=(first,)), names="hf")
    Path("base/tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    Path("other.jinja").write_text("{{ messages | length }}")
    options = ["--model=base", "--train=lora,ln_out.*", "--out=out", "--lora-rank=2"]
    args = train.options.parse(options)
    parts = train.prepare(args)[1]
    Path("bytes.json").write_text("{}")
    for template, args.tokenizer in ((None, None), ("other.jinja", "bytes.json"), ("none", None)):
        args.template = template
        train.outputs.save(args, parts, None)
        line = train.outputs.command(args, 256, args.tokenizer or "bytes")
        assert line == ["rwkv-jax", "generate", "out/model", "--adapter", "out/adapter"]
        jax.tree.map(np.testing.assert_array_equal, models.load("out/model").params, parts.params)
        found = chat.template_in("out/model")
        file = "chat_template.jinja"
        expected = {None: "tokenizer_config.json", "none": None, "other.jinja": file}
        assert (found and found.name) == expected[template]
        assert Path("out/model/tokenizer.json").exists() == (args.tokenizer is not None)
        assert Path("out/adapter", file).exists() == (template == "other.jinja")
    error = command.refused("merge", "base", "out/adapter", "merged.pth")
    assert error == "rwkv-jax merge: OUT is merged.pth; accepted is a folder\n"
    command("merge", "base", "out/adapter", "merged")
    assert_same = functools.partial(jax.tree.map, np.testing.assert_array_equal)
    assert_same(models.load("merged").params, models.load("base").params)
    assert chat.template_in("merged") == Path("merged/tokenizer_config.json")


@pytest.mark.slow
def test_another_generation(train: ModuleType, folder: Path, tmp_path: Path, capsys: Any) -> None:
    model = checkpoints.write_model(tmp_path, "RWKV-6", vocabulary=256)
    options = ["--train=lora,states", "--steps=2", "--batch=2", "--context=24", "--cache=none"]
    options += [f"--model={model}", f"--data={folder / 'text.txt'}", f"--out={tmp_path / 'out'}"]
    assert _commands.main(["train", *options, "--sample=2"]) == 0
    assert "RWKV-6 of " in capsys.readouterr().out
    finetuning.load_adapter(tmp_path / "out" / "adapter", models.inspect(model).params)


@pytest.mark.slow
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
def test_on_a_mesh(
    run: Run, train: ModuleType, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train.report, "sample", lambda *_: "")
    options = [f"--data={folder / 'talks.jsonl'}", "--train=lora,states", "--dora", "--steps=3"]
    for name, more in {"one": [], "several": ["--mesh=seq=2,model=2"]}.items():
        assert run(*options, *more, out=tmp_path / name) == 0
    one, several = log(tmp_path / "one"), log(tmp_path / "several")
    for name in ("train", "held_out"):
        np.testing.assert_allclose(one[name], several[name], rtol=1e-5)


GOOD = json.dumps({"text": TEXT}) + "\n"
BROKEN = {
    "no JSON": ('{"text": "a"', "Expecting ',' delimiter"),
    "an empty document": (json.dumps({"text": " "}), "the document is empty"),
    "an unknown role": (
        json.dumps({"messages": [said("bot", "a")]}),
        "message 1 has the role 'bot'",
    ),
    "no answer": (json.dumps({"messages": [said("user", "a")]}), "no answer of the assistant"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_documents(run: Run, tmp_path: Path, name: str, capsys: Any) -> None:
    """One line says where they are, also where they are read while the model is trained."""
    line, message = BROKEN[name]
    path = tmp_path / "texts.jsonl"
    path.write_text(GOOD * 30 + line)
    assert run(f"--data={path}", "--train=states") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"rwkv-jax train: {path}: line 31: ")
    assert message in last


def test_what_does_not_fit(run: Run, folder: Path, tmp_path: Path, capsys: Any) -> None:
    """One line says what is accepted."""
    write_bin_idx(tmp_path / "tokens", [[5, 300, 0]] * 30)
    other = rwkv7.Config(num_layers=3, hidden_size=64, head_size=16, vocab_size=256)
    params = random_like(shapes_of(rwkv7, other), 0.1)
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=2)
    finetuning.save_adapter(tmp_path / "adapter", adapter)
    models.save_state(tmp_path / "state.pth", rwkv7.initial_state(params, 1))
    text = f"--data={folder / 'text.txt'}"
    for options, message in {
        f"--data={tmp_path / 'tokens.bin'}": "document .* has the token 300; accepted are 0 to 255",
        f"--data={tmp_path / 'missing.jsonl'}": "missing.jsonl: No such file",
        f"{text}=-1": "whose weight is '-1'; .* with a positive number",
        f"--data={folder} --pattern=*": "data.* has tokens.bin; accepted in a folder are",
        f"{text}=x": "whose weight is 'x'; accepted are FILE and FILE=WEIGHT",
        f"{text} --validation=0.9": "--validation is 0.9; accepted are a share",
        f"{text} --train=lora --adapter={tmp_path / 'adapter'}": "those of an adapter of rank 2",
        f"{text} --train=states --initial-state={tmp_path / 'state.pth'}": "not those of RWKV-7",
        f"{text} --train=lora --lora-targets=att.other": "accepted are patterns of",
        f"{text} --train=att.other": "'att.other'; accepted are patterns of the names",
        f"{text} --base=int8": "--train is all where the base is int8",
        f"{text} --tokenizer=world": "accepted with a vocabulary of 256",
    }.items():
        assert run(*options.split(" ")) == 2, options
        _, program, told = capsys.readouterr().err.rpartition("rwkv-jax train: ")
        assert program, options
        assert re.search(message, told), told


def test_targets_that_do_not_go_together(run: Run, capsys: Any) -> None:
    for options, message in {
        "--train=all,lora": "accepted is all, or what is not all of it",
        "--train=lora --initial-state=x": "--initial-state --train states",
        "--dora": "--rslora and --dora need --train lora, and a new adapter, without --adapter",
        "--train=lora --dora --adapter=x": "without --adapter",
        "--train=states --task=reverse": "exclude each other",
        "--tokenizer=world": "--tokenizer needs --data",
    }.items():
        with pytest.raises(SystemExit, match=r"^2$"):
            run(*options.split(" "))
        assert message in capsys.readouterr().err
