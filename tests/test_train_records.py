"""What a run of training keeps, and when it ends: metrics, checkpoints, the best parameters, files
of options, and what is said before a run.

The steps of most runs here compute nothing.
"""

import contextlib
import importlib
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import models
from support.disks import files_up_to
from support.scripts import AtStep
from support.training import without_computing

Run: TypeAlias = Callable[..., int]


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """Options of a run of four steps with a checkpoint after each, into the folder `out`."""
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox\n" * 100)
    options = {"layers": 1, "width": 32, "head-size": 16, "steps": 4, "batch": 2, "context": 16}
    options |= {"eval-tokens": 48, "save-every": 1, "cache": "none", "data": text}
    return [f"--{n}={x}" for n, x in (options | {"out": tmp_path / "out"}).items()]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def run(train: ModuleType, given: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    without_computing(train, monkeypatch)
    return lambda *more: train.main([*given, *more])


@pytest.fixture
def held_out(
    train: ModuleType, run: Run, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[float]], None]:
    """Says which losses the evaluations of a run give, one after another."""

    def held_out(losses: Sequence[float]) -> None:
        values = iter(losses)
        monkeypatch.setattr(train.loop, "evaluation", lambda *_: lambda _: next(values))

    return held_out


def steps_kept(out: Path) -> set[int]:
    return {int(path.suffix[1:]) for path in out.glob("checkpoint.*")}


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_metrics(run: Run, out: Path, held_out: Any) -> None:
    """A line for each step."""
    held_out([5.0, 4.0])
    assert run("--eval-every=2") == 0
    lines = metrics(out)
    measured = {"loss": 9.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    for step, line in enumerate(lines, 1):
        assert line.items() >= {"step": step, **measured}.items()
        assert line["seconds"] > 0
        assert ("tokens_per_second" in line) == (step > 1)
    assert [line.get("held_out_loss") for line in lines] == [None, 5.0, None, 4.0]
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


@pytest.mark.parametrize("end", ["", '{"step": 4, "lo', "\0\0\0"])
def test_metrics_of_a_resumed_run(run: Run, at_step: AtStep, out: Path, end: str) -> None:
    """The lines after the checkpoint, one of which is not whole, are replaced."""
    at_step(3, lambda: signal.raise_signal(signal.SIGINT))
    assert run("--steps=10", "--save-every=2") == 130
    shutil.rmtree(out / "checkpoint.4")
    before = metrics(out)
    assert [line["step"] for line in before] == [1, 2, 3, 4]
    with (out / "metrics.jsonl").open("a") as file:
        file.write(end)
    at_step(10, lambda: None)
    assert run("--steps=10", "--save-every=2", "--resume") == 0
    after = metrics(out)
    assert [line["step"] for line in after] == [*range(1, 11)]
    assert after[:2] == before[:2]
    assert after[2]["seconds"] > before[1]["seconds"]
    # A run that replaces another one begins with an empty file.
    assert run("--force", "--steps=1") == 0
    assert [line["step"] for line in metrics(out)] == [1]


def test_tensorboard(run: Run, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What the lines have is written as scalars, and later steps than the checkpoint are hidden."""
    scalars: list[tuple[Any, ...]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int):
            scalars.append((folder, purge_step))

        def add_scalar(self, *scalar: Any) -> None:
            scalars.append(scalar)

        def close(self) -> None:
            scalars.append(())

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=Writer))
    assert run("--tensorboard") == run("--tensorboard", "--resume", "--steps=4") == 0
    folder = str(out / "tensorboard")
    assert [x for x in scalars if len(x) == 2] == [(folder, 1), (folder, 5)]
    assert scalars.count(()) == 2
    written = {(step, name): x for name, x, step in (x for x in scalars if len(x) == 3)}
    expected = {(line["step"], n): x for line in metrics(out) for n, x in line.items()}
    assert written == {key: x for key, x in expected.items() if key[1] != "step"}

    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(SystemExit):
        run("--tensorboard", "--force")
    assert "--tensorboard needs the package tensorboardX" in capsys.readouterr().err


def test_profile(run: Run, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be profiled is refused before anything of an earlier run is replaced."""
    folder = tmp_path / "profile"
    assert run("--steps=10", f"--profile={folder}") == 0
    show = importlib.import_module("show_profile").main
    capsys.readouterr()
    assert show([str(folder)]) == 0
    assert "| products " in capsys.readouterr().out

    before = metrics(out)
    with pytest.raises(SystemExit, match=r"--profile records steps 8 to 10 .* takes 9 steps"):
        run("--force", "--steps=9", f"--profile={folder}")
    file = tmp_path / "text"
    with pytest.raises(SystemExit, match=f"--profile {re.escape(str(file))} cannot be written to"):
        run("--force", "--steps=10", f"--profile={file}")
    assert metrics(out) == before


def test_profile_that_cannot_be_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training goes on."""

    def stop() -> None:
        raise jax.errors.JaxRuntimeError("no space left")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *_, **__: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    assert run("--steps=12", f"--profile={tmp_path}") == 0
    assert f"--profile {tmp_path} has no profile: no space left" in capsys.readouterr().err


def test_kept_checkpoints(run: Run, out: Path) -> None:
    assert run("--keep=3") == 0
    assert steps_kept(out) == {2, 3, 4}
    (out / "checkpoint.4" / "SHA256SUMS").unlink()
    # A resumed run may have other options of memory as well.
    assert run("--keep=1", "--resume", "--accumulate=2") == 0
    assert steps_kept(out) == {4}


def test_one_checkpoint(train: ModuleType, tmp_path: Path) -> None:
    """The one before is removed when a later loss is known to be a number."""
    log = {"train": [9.0], "held_out": [], "averaged": [], "ngrams": {}}
    with train.checkpoints.Saver(tmp_path, {}, 0, keep=1) as saver:
        for _ in range(2):
            saver.save({"x": jnp.ones(2)}, log)
            log["train"].append(9.0)
        saver.wait()
        for known, kept in ((2, {1, 2}), (3, {2})):
            saver.check(known)
            assert steps_kept(tmp_path) == kept


def test_error_while_a_checkpoint_is_written(train: ModuleType, tmp_path: Path) -> None:
    log = {"train": [9.0], "held_out": [], "averaged": [], "ngrams": {}}

    def run() -> None:
        with train.checkpoints.Saver(tmp_path, {}, 0) as saver:
            saver.save({"x": jnp.ones(2)}, log)
            raise RuntimeError("of a step")

    with pytest.raises(RuntimeError, match="of a step"):
        run()
    assert train.checkpoints.newest(tmp_path) == 1


def test_checkpoints_by_time(run: Run, out: Path) -> None:
    """Here more time than --save-minutes has always gone by."""
    assert run("--keep=9", "--save-every=100", "--save-minutes=60") == 0
    assert steps_kept(out) == {4}
    assert run("--keep=9", "--save-every=100", "--save-minutes=1e-9", "--force") == 0
    assert steps_kept(out) == {1, 2, 3, 4}


def test_early_end(run: Run, out: Path, held_out: Any, capsys: Any) -> None:
    """A run ends where --patience says, also when it is resumed, and a resumed run with another one
    goes on."""
    losses = [5.0, 3.0, 4.0, 3.0, 2.0, 1.0]
    more = ["--steps=6", "--eval-every=1", "--patience"]
    held_out(losses)
    for resumed in ([], ["--resume"]):
        assert run(*more, "2", *resumed) == 0
        shown = capsys.readouterr().out
        assert "No held-out loss was lower than that of step 2: ended early" in shown
        assert max(steps_kept(out)) == 4
    held_out(losses[4:])
    assert run(*more, "3", "--resume") == 0
    assert "ended early" not in capsys.readouterr().out
    log = json.loads((out / "log.json").read_text())
    assert [loss for _, loss in log["held_out"]] == losses


def test_best_checkpoint(
    train: ModuleType, run: Run, out: Path, held_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is saved whatever --save-every says, kept, and its parameters are the result."""

    def step(state: Any, _: Any) -> tuple[Any, Any]:
        params = jax.tree.map(
            lambda x: jnp.full_like(x, state.optimizer[0][3].steps + 1), state.params
        )
        optimizer = jax.tree.map(lambda x: x + 1, state.optimizer)
        measures = train.loop.steps.Measures(*map(jnp.float32, (9.0, 1.0, 0.1)))
        return state._replace(params=params, optimizer=optimizer), measures

    compiled: Future[Any] = Future()
    compiled.set_result(step)
    monkeypatch.setattr(train.loop, "compiled_step", lambda *_: compiled)
    more = ["--steps=8", "--eval-every=1", "--save-every=100", "--best", "--keep=1"]
    held_out([5.0, 3.0, 4.0, 3.5, 3.0, 3.25, 6.0, 7.0])

    def result() -> np.ndarray:
        return np.unique(models.load(out / "model.safetensors").params.head.weight)

    assert run(*more) == 0
    assert steps_kept(out) == {2, 8}
    assert result() == 2
    assert run(*more, "--resume") == 0
    assert result() == 2
    (out / "checkpoint.2" / "SHA256SUMS").unlink()
    assert run(*more, "--resume") == 0
    assert result() == 8


def test_full_disk(
    run: Run,
    at_step: AtStep,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One error, and the checkpoints before are whole. The run resumes when there is room. A run
    without a checkpoint tries again."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(SystemExit, match=r"--out .* has room for 0\.000 GB, and a checkpoint "):
            run()
    assert not out.exists()
    room = contextlib.ExitStack()

    def make_room() -> None:
        for _ in range(1000):
            if "the run goes on and tries again at its next" in capsys.readouterr().err:
                break
            time.sleep(0.01)
        room.close()

    more = ("--steps=3", "--keep=9")
    with room:
        room.enter_context(files_up_to(2**14))
        with pytest.raises(SystemExit, match=r"the run has no checkpoint, and its steps are lost$"):
            run("--steps=1")
        at_step(1, make_room)
        assert run(*more) == 0
    assert steps_kept(out) == {2, 3}
    checkpoints = importlib.import_module("rwkv_jax._training.checkpoints")
    shutil.rmtree(out / "checkpoint.3")
    message = r"checkpoint\.3 cannot be written: .*; --resume continues from .*checkpoint\.2$"
    with files_up_to(2**14), pytest.raises(SystemExit, match=message):
        run(*more, "--resume")
    for _ in range(50):  # other threads of Orbax may end later
        time.sleep(0.01)
    assert "Traceback" not in capsys.readouterr().err
    assert checkpoints.newest(out) == 2
    assert run(*more, "--resume") == 0
    assert steps_kept(out) == {2, 3}


def test_no_room_for_metrics(run: Run, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`capsys` keeps what is printed out of files."""
    message = r"^--out .* cannot be written to: .*File too large"
    more = ("--steps=20", "--save-every=100")
    with files_up_to(1), pytest.raises(SystemExit, match=message):
        run(*more)
    assert run(*more) == 0
    assert [line["step"] for line in metrics(out)] == [*range(1, 21)]


def parsed(train: ModuleType, tmp_path: Path, text: str, *argv: str) -> dict[str, Any]:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return vars(train.options.parse([f"--options={file}", *argv]))


def test_file_of_options(train: ModuleType, tmp_path: Path) -> None:
    text = 'learning-rate = 1e-3\nsave_every = 7\nbest = true\nresume = false\nmesh = "data=2"\n'
    text += "piece = 64\ntruncate = true\n"
    args = parsed(
        train, tmp_path, f'{text}steps = 5\nprompt = "--a b"\n', "--steps", "9", "--seed=2"
    )
    expected = {"learning_rate": 1e-3, "save_every": 7, "best": True, "resume": False}
    expected |= {
        "piece": 64,
        "truncate": True,
        "mesh": {"data": 2},
        "steps": 9,
        "prompt": "--a b",
        "seed": 2,
    }
    assert args.items() >= expected.items()
    text = 'train = ["lora", "states"]\ndata = ["a=2", "b"]\nmodel = "m"\nout = "~/out"\n'
    expected = {"train": "lora,states", "data": ["a=2", "b"], "out": Path("~/out").expanduser()}
    assert parsed(train, tmp_path, text).items() >= expected.items()
    assert train.options.parse([f"--opt={tmp_path / 'run.toml'}"]).train == "lora,states"
    # Defaults of a task, which the command line or the file changes.
    args = parsed(train, tmp_path, 'task = "reverse"\nbatch = 3\n', "--context=64")
    assert args.items() >= {"batch": 3, "context": 64, "l2_wrap": 0.0}.items()


WRONG = {
    "learning-rte = 1": "has 'learning-rte', which is no option; the closest is 'learning_rate'",
    'options = "x"': "has 'options', which is no option",
    "steps = 0": "argument --steps: '0' is not an integer from 1",
    "steps = true": "run.toml: steps is True; accepted is a text or a number",
    "best = 1": "run.toml: best is 1; accepted is true or false",
    "steps = 2026-01-01": "accepted is a text or a number, or a list of them",
    "[steps]\na = 1": "accepted is a text or a number, or a list of them",
    "steps": "run.toml: ",
}


@pytest.mark.quick
@pytest.mark.parametrize("text", WRONG)
def test_wrong_files_of_options(
    train: ModuleType, tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        parsed(train, tmp_path, text)
    assert WRONG[text] in capsys.readouterr().err


def test_checkpoint_of_other_files(train: ModuleType, tmp_path: Path) -> None:
    """The checksums in a checkpoint tell a user nothing."""
    record = tmp_path / "checkpoint.1" / "record.json"
    record.parent.mkdir()
    data = [[4, 1, 2, 3, 4], [7]]
    options = {"data": data, "model": 2}
    record.write_text(json.dumps({"options": options, "log": {}, "data": None}))
    mended = {"data": [[4, 1, 9, 3, 4], [7]]}
    for same in (options, mended):
        assert train.checkpoints.record(tmp_path, 1, same) == ({}, None)
    others = [], data[:1], [[4, 1, 2, 3, 4], [8]], [[5, 1, 2, 3, 4], [7]], [[4, 1, 9, 9, 9], [7]]
    refused = [({"data": x}, "other data; accepted are the same") for x in others]
    for wrong, message in (*refused, ({"model": 3}, "another model$")):
        with pytest.raises(SystemExit, match=f"checkpoint.1 was made with {message}"):
            train.checkpoints.record(tmp_path, 1, wrong)


def test_broken_line(run: Run, out: Path, tmp_path: Path, capsys: Any) -> None:
    """A run that reads one ends with a checkpoint of all of its steps, and goes on when the line is
    mended."""
    lines = [json.dumps({"text": f"text {i:5}"}) for i in range(300)]
    path, more = tmp_path / "texts.jsonl", ["--steps=12", "--save-every=11", "--batch=32"]
    more.append(f"--data={path}")
    path.write_text("\n".join([*lines[:150], "{", *lines[151:]]))
    message = f"^{path}: line 151: .*; the run has ended after step (.*). --resume continues from "
    with pytest.raises(ValueError, match=message) as error:
        run(*more)
    (step,) = steps_kept(out)
    assert str(error.value).endswith(f"{out / f'checkpoint.{step}'}")
    assert len(metrics(out)) == step
    path.write_text("\n".join(lines[:299]))
    with pytest.raises(SystemExit, match="was made with other data"):
        run(*more, "--resume")
    path.write_text("\n".join(lines))
    assert run(*more, "--resume") == 0
    assert f"Continuing after step {step}" in capsys.readouterr().out
    assert [line["step"] for line in metrics(out)] == [*range(1, 13)]


def test_wrong_parts(train: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.options.parse(["--batch=6", "--accumulate=3", "--mesh=data=4"])
    assert "--accumulate is 3 where --batch is 6" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run(
    train: ModuleType, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It writes nothing, and what it says of memory is what a step takes."""
    before = {*tmp_path.rglob("*")}
    found = []
    for parts in (1, 2):
        more = [f"--accumulate={parts}", "--peak=1", "--batch=4", "--context=64"]
        assert train.main([*given, *more, "--dry-run"]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append({line[:20].strip(): line[22:] for line in lines if "  " in line})
    assert {*tmp_path.rglob("*")} == before
    whole, parts = found
    count = train.sizes.size(train.prepare(train.options.parse(given))[0].shapes.params)
    assert whole["parameters"] == f"{count:,}, {count:,} trained"
    assert whole["tokens a step"] == "256"
    assert whole["steps an epoch"] == f"{1900 / 256:.1f}"
    state = float(whole["arrays between steps"].partition(" ")[0])
    assert state == pytest.approx(3 * 4 * count / 1e6, rel=0.05)
    assert whole["a checkpoint"].split()[0] == f"{(12 * count + 16) / 1e6:.3f}"
    memory = [float(x["arrays in a step"].partition(" ")[0]) for x in found]
    assert memory[1] < 0.9 * memory[0]
    model, _ = train.prepare(train.options.parse(given))
    operations = train.sizes.flops_per_token(model.shapes.params)
    assert parts["speed"].startswith(f"{operations * 256 / 0.4e12:.3g} s a step")
