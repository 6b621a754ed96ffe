"""Training: it learns, from rows in pieces as from whole rows, and an interrupted run resumes as if
it had not been interrupted."""

import functools
import importlib
import json
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import models
from rwkv_jax.models import rwkv7
from support import checkpoints, hlo, scripts
from support.models import random_like, shapes_of
from support.scripts import AtStep

TEXT = b"the quick brown fox jumps over the lazy dog\n" * 200
STEPS, INTERRUPTED_AT = 8, 5
needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
interrupt = functools.partial(signal.raise_signal, signal.SIGINT)
terminate = functools.partial(signal.raise_signal, signal.SIGTERM)


@pytest.fixture(scope="module", autouse=True)
def in_parts() -> Iterator[None]:
    """The steps of these models have a program for each part, as those of large ones have."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("rwkv_jax._training.steps"), "FEW", 0)
        yield


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("data") / "text"
    text.write_bytes(TEXT)
    given = {"layers": 1, "width": 32, "head-size": 16, "steps": STEPS, "batch": 2, "context": 16}
    given |= {"eval-every": 3, "eval-tokens": 48, "save-every": 2, "sample": 8, "warmup": 2}
    given |= {"cache": "none", "ema": 0.9}
    return [f"--data={text}", *(f"--{name}={x}" for name, x in given.items())]


@pytest.fixture(scope="module")
def whole(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on one device."""
    out = tmp_path_factory.mktemp("whole")
    with scripts.running(scripts.TRAIN) as train, pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.report, "sample", lambda *_: "")
        assert train.main([*options, f"--out={out}"]) == 0
    return out


def saved(folder: Path, name: str = "model.safetensors") -> dict[str, np.ndarray]:
    """The parameters in a file, by the names of the official checkpoints."""
    params = models.load(folder / name).params
    return jax.tree.map(np.asarray, rwkv7.names(params))


def arrays(folder: Path) -> dict[str, np.ndarray]:
    last = max(folder.glob("checkpoint.*"), key=lambda path: int(path.suffix[1:]))
    with ocp.StandardCheckpointer() as checkpointer:
        return jax.tree.map(np.asarray, checkpointer.restore(last.absolute()))


def logs(*folders: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / "log.json").read_text()) for folder in folders]


@pytest.mark.slow
def test_interrupted_run_resumes_exactly(
    train: ModuleType,
    options: list[str],
    whole: Path,
    tmp_path: Path,
    at_step: AtStep,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = tmp_path / "parts"
    at_step(INTERRUPTED_AT - 1, interrupt)
    assert train.main([*options, f"--out={parts}"]) == 130
    assert f"after step {INTERRUPTED_AT};" in capsys.readouterr().out
    assert not (parts / "log.json").exists()

    assert train.main([*options, f"--out={parts}", "--resume"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("nats/token", "bits/byte", "RWKV-7", "sample"))
    assert "tokens/s" in output
    assert (parts / "loss.png").read_bytes().startswith(b"\x89PNG")
    log, expected = logs(parts, whole)
    assert log == expected
    # Sizes are recorded under the names that earlier checkpoints have.
    sizes = {"layers": 1, "width": 32, "head_size": 16, "vocabulary": 256}
    assert log["options"].items() >= sizes.items()
    assert len(log["train"]) == STEPS
    assert [step for step, _ in log["held_out"]] == [3, 6, STEPS]
    assert log["train"][-1] < log["train"][0] - 1
    results, others = arrays(parts), arrays(whole)
    assert set(results) == set(others)
    assert all(np.array_equal(results[name], others[name]) for name in results)
    params = saved(parts)
    assert {f"model.{n}" for n in params} == {n for n in results if n.startswith("model.")}
    assert all(np.array_equal(x, results[f"model.{n}"]) for n, x in params.items())
    average = saved(parts, "ema.safetensors")
    assert all(np.array_equal(x, results[f"optimizer.4.average.{n}"]) for n, x in average.items())
    steps = [json.loads(x)["step"] for x in (parts / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, STEPS + 1)]

    with pytest.raises(SystemExit, match="was made with batch 2, not 4"):
        train.main([*options, f"--out={parts}", "--resume", "--batch=4"])


@pytest.fixture
def without_sample(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.report, "sample", lambda *_: "")


@pytest.mark.slow
@needs_devices
def test_run_resumes_on_another_mesh(
    train: ModuleType,
    options: list[str],
    whole: Path,
    tmp_path: Path,
    at_step: AtStep,
    without_sample: None,
) -> None:
    """First each device runs the program of one, then the compiler partitions it."""
    parts = tmp_path / "parts"
    at_step(INTERRUPTED_AT - 1, terminate)
    # Three held-out rows, which two devices do not share evenly.
    assert train.main([*options, f"--out={parts}", "--mesh=data=2"]) == 130
    assert train.main([*options, f"--out={parts}", "--mesh=model=2,seq=2", "--resume"]) == 0
    log, expected = logs(parts, whole)
    assert log["options"] == expected["options"]
    assert len(log["train"]) == STEPS
    for name in ("train", "held_out", "averaged"):
        np.testing.assert_allclose(log[name], expected[name], rtol=1e-5)


@pytest.mark.slow
@needs_devices
def test_training_keeps_everything_where_it_is(train: ModuleType, options: list[str]) -> None:
    """Devices exchange only transitions and single tokens of a sequence, rows of the embedding, and
    no whole activations except the sums of a layer."""
    steps = importlib.import_module("rwkv_jax._training.steps")
    args = train.options.parse([*options, "--mesh=model=2,seq=2"])
    model, _ = train.prepare(args)
    mesh, optimizer = model.mesh, train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    state = steps.initial_state(model, optimizer, shapes, seed=args.seed)
    places = {name: x.sharding for name, x in steps.named(state).items()}
    for name in ("model", "optimizer.0.mu", "optimizer.0.nu"):
        place = places[f"{name}.blocks.0.att.receptance.weight"]
        assert place.is_equivalent_to(NamedSharding(mesh, P("model", ("data", "seq"))), 2)
    batch = train.data.windows(np.zeros((2, 17), np.int32))
    step = steps.train_step(model, optimizer, shapes, 0.0).trace(state, batch).lower().compile()
    allowed = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"}
    assert {"all-reduce"} <= hlo.collectives(step.gradients.as_text()) <= allowed
    assert not any(hlo.collectives(x.as_text()) for x in step.updates)
    state, _ = step(state, batch)
    for name, x in steps.named(state).items():
        assert x.sharding.is_equivalent_to(places[name], x.ndim), name


def test_most_operations_are_of_matrices(train: ModuleType) -> None:
    """The official 1.5B model has 1.53e9 parameters, 2 * 65536 * 2048 of them not in layers."""
    count = train.sizes.flops_per_token(shapes_of(rwkv7, train.options.SIZES["1.5b"]))
    layers, states = 1.53e9 - 2 * 65536 * 2048, 24 * 32 * 64**2
    assert count == pytest.approx(6 * (layers + 256 * 2048 + 4 * states), rel=5e-3)


def test_every_twentieth_file_is_held_out(train: ModuleType, tmp_path: Path) -> None:
    """Of files of a pattern, but neither tests nor folders nor broken links."""
    for i in range(40):
        (tmp_path / f"{i:02}.py").write_text(f"<{i}>")
    (tmp_path / "test").mkdir()
    for other in ("test/no.py", "no.txt"):
        (tmp_path / other).write_text("not ours")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / "missing")
    text, held_out = train.data.read(tmp_path, "*.py")
    assert bytes(held_out) == b"<19>\n<39>"
    assert bytes(text) == "\n".join(f"<{i}>" for i in range(40) if i % 20 != 19).encode()


def test_standard_library_is_the_default(train: ModuleType) -> None:
    text, held_out = train.data.read(None, "*.py")
    assert len(text) > 10 * len(held_out) > 1_000_000
    assert b"class OrderedDict" in bytes(text) + bytes(held_out)
    source = train.source_of(train.options.parse(["--eval-tokens=256"]))
    assert source.held_out.tokens.shape == (2, 128)
    log = {"held_out": [[1, 2.0]], "averaged": [], "ngrams": source.ngrams}
    size = train.report.bytes_per_token(source.tokenizer, source.held_out)
    table = train.report.table(log, 1, size)
    assert table.splitlines()[0].split() == ["held-out", "loss", "nats/token", "bits/byte"]
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["unigram", "bigram", "RWKV-7"]


def test_ngrams_predict_what_they_counted(train: ModuleType) -> None:
    text = np.frombuffer(b"ab" * 5000, np.uint8)
    losses = train.data.ngram_losses(text, text[None, :101])
    assert losses["unigram"] == pytest.approx(np.log(2), abs=0.05)
    assert losses["bigram"] == pytest.approx(0, abs=0.01)


@pytest.mark.slow
def test_rows_in_pieces(
    train: ModuleType, options: list[str], whole: Path, tmp_path: Path, without_sample: None
) -> None:
    """Exact gradients are those of whole rows; truncated ones are others."""
    exact, truncated = tmp_path / "exact", tmp_path / "truncated"
    assert train.main([*options, f"--out={exact}", "--piece=4"]) == 0
    assert train.main([*options, f"--out={truncated}", "--piece=4", "--truncate"]) == 0
    log, other, expected = logs(exact, truncated, whole)
    for name in ("train", "held_out"):
        np.testing.assert_allclose(log[name], expected[name], rtol=1e-5)
    # With the official initial parameters states do not matter in the first steps.
    assert other["train"][0] == pytest.approx(expected["train"][0], rel=1e-5)
    assert other["train"][-1] != pytest.approx(expected["train"][-1], rel=1e-5)


@pytest.fixture
def task_options(tmp_path: Path) -> list[str]:
    given = {"task": "reverse", "longest": 4, "layers": 1, "width": 32, "head-size": 16}
    given |= {"steps": 4, "batch": 2, "context": 16, "eval-tokens": 64, "judge": 3, "out": tmp_path}
    given |= {"cache": "none"}
    return [f"--{name}={x}" for name, x in given.items()]


def test_only_answers_count(train: ModuleType, task_options: list[str]) -> None:
    """Rows consist of whole questions with their answers, and the mask has all of the answers.
    Batches depend on the step."""
    examples = train.tasks.Examples(train.options.parse(task_options))
    lengths = set()
    for batch in (examples.held_out, *map(examples.batch, range(4))):
        np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        for tokens, targets, mask, segment_ids in zip(*batch, strict=True):
            row = bytes([*tokens, targets[-1]])
            documents = list(re.finditer(rb"([0-9]+)=([0-9]+)\n", row))
            assert b"".join(document[0] for document in documents) == row.rstrip(b"\0")
            answers, numbers = np.zeros((2, len(row)))
            for number, document in enumerate(documents, 1):
                question, answer = document.groups()
                assert answer == question[::-1]
                answers[document.start(2) - 1 : document.end() - 1] = 1
                numbers[document.start() : document.end()] = number
                lengths.add(len(question))
            np.testing.assert_array_equal(mask, answers[:-1])
            np.testing.assert_array_equal(segment_ids, numbers[:-1])
    assert lengths == {1, 2, 3, 4}
    first, again, other = (examples.batch(step) for step in (2, 2, 3))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert not np.array_equal(first.tokens, other.tokens)


def test_judge(train: ModuleType, task_options: list[str]) -> None:
    """An answer counts if all of it is right."""
    examples = train.tasks.Examples(train.options.parse(task_options))

    def answer(questions: np.ndarray, length: int, wrong: Sequence[int] = ()) -> np.ndarray:
        rows = [bytes(row.astype(np.uint8)).lstrip(b"\0") for row in questions]
        answers = [row[-2::-1] + b"\n" for row in rows]
        result = np.array([list(a.ljust(length, b"?")) for a in answers])
        result[:, list(wrong)] += 1
        return result

    assert examples.exact(answer, 5) == dict.fromkeys(range(1, 5), 1.0)
    for wrong in (0, 1):
        assert examples.exact(functools.partial(answer, wrong=[wrong]), 5)[4] == 0.0
    # The fourth byte is after the end of the two shortest answers.
    assert list(examples.exact(functools.partial(answer, wrong=[3]), 5).values()) == [1, 1, 0, 0]


@pytest.mark.slow
def test_task(
    train: ModuleType, task_options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last lines of a run of a task say what it has learned, also when it is resumed."""
    for more in ([], ["--resume"]):
        assert train.main([*task_options, *more]) == 0
        output = capsys.readouterr().out
        assert re.search(r"all +\d+ of 12, ", output)
        prompt = "--prompt 0123456789= --temperature 0"
        assert f"generate {tmp_path / 'model.safetensors'} {prompt}" in output
    (log,) = logs(tmp_path)
    assert len(log["train"]) == 4
    assert list(log["exact"]) == ["1", "2", "3", "4"]
    assert log["ngrams"] == {}


@pytest.mark.slow
def test_answers(train: ModuleType, task_options: list[str]) -> None:
    """They are the most likely bytes after a question without padding."""
    params = random_like(shapes_of(rwkv7, train.options.config(train.options.parse(task_options))))
    question = np.array([list(b"12=")] * 3, np.int32)
    answer = train.report.answering(train.options.parse(task_options), params)
    answers = answer(np.pad(question, ((0, 0), (2, 0))), 5)
    tokens = jnp.asarray(np.concatenate([question, answers[:, :-1]], axis=1))
    logits, _ = jax.jit(rwkv7.apply)(params, tokens)
    np.testing.assert_array_equal(logits.argmax(-1)[:, 2:], answers)


@pytest.mark.slow
def test_start_from_a_model(
    train: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parameters and the sizes are those of the file, which without data has to be a model of
    bytes."""
    path = tmp_path / "model.safetensors"
    option = f"--model={path}"
    params = random_like(shapes_of(rwkv7, rwkv7.Config(1, 64, head_size=64, vocab_size=256)))
    models.save(path, params)
    _, given = train.prepare(train.options.parse([option, "--size=0.1b"]))
    jax.tree.map(np.testing.assert_array_equal, given.params, params)

    models.save(path, models.quantize(params))
    with pytest.raises(ValueError, match="where the base is int8; accepted are lora and states"):
        train.prepare(train.options.parse([option]))
    for version, more, accepted in (
        ("RWKV-4", [], "RWKV-5 to 7"),
        ("RWKV-6", ["--mesh=data=2"], "RWKV-7"),
    ):
        checkpoints.write_model(tmp_path, version, vocabulary=256)
        with pytest.raises(SystemExit, match=f"--model is {version}; accepted is {accepted}"):
            train.main([option, *more])
    other = checkpoints.write_model(tmp_path, vocabulary=300)
    with pytest.raises(SystemExit, match="300 different tokens; accepted without --data"):
        train.main([f"--model={other}"])
    with pytest.raises(SystemExit):
        train.main([option, "--layers=2"])
    assert "--model excludes --layers" in capsys.readouterr().err


def test_growing_questions(train: ModuleType, task_options: list[str]) -> None:
    """Questions grow during a share of the steps, or have any length from the first step on."""

    def longest(growth: float) -> list[int]:
        options = [*task_options, f"--growth={growth}", "--steps=100", "--batch=20"]
        examples = train.tasks.Examples(train.options.parse(options))
        texts = (bytes(examples.batch(step).tokens.astype(np.uint8)) for step in (0, 39, 40))
        return [max(map(len, re.findall(rb"[0-9]+(?==)", text))) for text in texts]

    assert longest(0.4) == [1, 4, 4]
    assert longest(0.8) == [1, 2, 3]
    assert longest(0) == [4, 4, 4]
