"""What train.py refuses before it starts, and its files: which run they belong to, and what happens
where they are damaged or cannot be written.

Most runs here have steps that compute nothing.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support import checkpoints, scripts

RESULTS = {"model.safetensors", "log.json", "loss.png"}


@pytest.fixture
def train() -> Iterator[ModuleType]:
    with scripts.running("train") as module:
        yield module


def without_computing(train: ModuleType, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train.loop, "bound_train_step", lambda *_: lambda _: 9.0)
    patch.setattr(train.loop, "evaluate", lambda *_: 5.0)
    patch.setattr(train.report, "speed", lambda *_: "")
    patch.setattr(train.report, "sample", lambda *_: "")
    patch.setattr(train.report, "plot", lambda path, _: path.touch())


@pytest.fixture
def quick(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    without_computing(train, monkeypatch)
    return train


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("data") / "text"
    text.write_bytes(b"the quick brown fox\n" * 100)
    given = {"layers": 1, "width": 32, "head-size": 16, "steps": 4, "batch": 2, "context": 16}
    given |= {"eval-bytes": 48, "save-every": 1}
    return [f"--data={text}", *(f"--{name}={x}" for name, x in given.items())]


@pytest.fixture(scope="module")
def finished(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    with scripts.running("train") as train, pytest.MonkeyPatch.context() as patch:
        without_computing(train, patch)
        assert train.main([*options, f"--out={out}"]) == 0
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    """A copy of the folder of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "out"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


@pytest.mark.parametrize(
    "given",
    [
        *(f"--{name}={x}" for name in ("steps", "batch", "judge", "layers") for x in (0, -1, "x")),
        *(f"--{name}={x}" for name in ("warmup", "seed") for x in (-1, 2**31, 0.5)),
        *(f"--learning-rate={x}" for x in ("nan", "inf", "-1", "1e39")),
        *(f"--weight-decay={x}" for x in ("nan", "-1")),
        *(f"--l2-wrap={x}" for x in ("nan", "-1")),
        *(f"--temperature={x}" for x in ("nan", "-1", "1e-7", "inf")),
        *(f"--growth={x}" for x in ("nan", "-1", "2")),
        *(f"--peak={x}" for x in ("nan", "0")),
        *(f"--{name}=" for name in ("prompt", "pattern", "out", "data", "model", "coordinator")),
        "--prompt=\udcff",
        *(f"--coordinator={x}" for x in ("host", "host:", ":1", "host:0", "host:65536")),
        "--process=-1",
    ],
)
def test_options_that_are_refused(
    train: ModuleType, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line names the option, what was given and what is accepted."""
    with pytest.raises(SystemExit) as error:
        train.options.parse([given])
    assert error.value.code == 2
    option, _, value = given.partition("=")
    assert f": error: argument {option}: {value!r} is not " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--width=100"], "hidden_size is 100; accepted is a multiple of head_size = 64"),
        (["--head-size=48"], "hidden_size is 128; accepted is a multiple of head_size = 48"),
        (["--resume", "--force"], "not allowed with argument --resume"),
    ],
)
def test_options_that_do_not_go_together(
    train: ModuleType, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.options.parse(given)
    assert message in capsys.readouterr().err


def test_extreme_options_that_are_accepted(train: ModuleType) -> None:
    args = train.options.parse(
        ["--temperature=0", "--warmup=0", "--seed=2147483647", "--l2-wrap=0"]
    )
    assert (args.temperature, args.warmup, args.seed, args.l2_wrap) == (0, 0, 2**31 - 1, 0)


def test_models_that_are_refused(train: ModuleType, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    checkpoints.write_safetensors(whole, checkpoints.rwkv7(vocabulary=256))
    cut.write_bytes(whole.read_bytes()[:-1])
    text = tmp_path / "text"
    text.write_text("a text")
    for path in (cut, text, tmp_path, tmp_path / "missing.safetensors"):
        with pytest.raises(SystemExit, match="--model: "):
            train.options.config(train.options.parse([f"--model={path}"]))


def test_implementation_that_cannot_run(
    train: ModuleType, options: list[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"--implementation: .*'ffi' cannot run this call"):
        train.main([*options, "--head-size=8", "--implementation=ffi", f"--out={tmp_path}"])


def test_folders_and_broken_links_are_not_data(train: ModuleType, tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i:02}.py").write_text(f"<{i}>")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "link.py").symlink_to(tmp_path / "missing")
    assert bytes(train.data.read(tmp_path, "*.py")[1]) == b"<19>"


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        ("missing", "*.py", "No such file"),
        ("", "/*.py", "Non-relative patterns are unsupported"),
        ("", "*.py", "has 0 files"),
    ],
)
def test_data_that_is_refused(
    train: ModuleType, tmp_path: Path, name: str, pattern: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        train.data.read(tmp_path / name, pattern)


@pytest.mark.parametrize("name", ["file", "file/out", "out"])
def test_out_is_checked_before_work_starts(
    train: ModuleType,
    options: list[str],
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    monkeypatch.setattr(train, "run", None)
    with pytest.raises(SystemExit, match=f"--out .*{name} cannot be written to: "):
        train.main([*options, f"--out={tmp_path / name}"])


@pytest.mark.parametrize("protected", [".", "model.safetensors", "log.json", "loss.png"])
def test_read_only_out(quick: ModuleType, options: list[str], out: Path, protected: str) -> None:
    (out / protected).chmod(0o500)
    if os.access(out / protected, os.W_OK):
        pytest.skip("the superuser writes to everything")
    with pytest.raises(SystemExit, match=r"cannot be written to: .*Permission denied"):
        quick.main([*options, f"--out={out}", "--force"])
    (out / protected).chmod(0o700)


def at_step(
    train: ModuleType, patch: pytest.MonkeyPatch, step: int, action: Callable[[], Any]
) -> None:
    batch_at = train.data.batch_at

    def acting(number: int, *args: Any, **options: Any) -> np.ndarray:
        if number == step:
            patch.undo()
            without_computing(train, patch)
            action()
        return batch_at(number, *args, **options)

    patch.setattr(train.data, "batch_at", acting)


def test_failed_save(
    quick: ModuleType,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One error, and no thread that keeps the process alive."""
    out, kept = tmp_path / "out", tmp_path / "kept"

    def replace_by_a_file() -> None:
        out.rename(kept)
        out.touch()

    at_step(quick, monkeypatch, 2, replace_by_a_file)
    before = set(threading.enumerate())
    message = r"checkpoint.3 cannot be written: .*Not a directory.*; --resume continues from .*\.2$"
    with pytest.raises(SystemExit, match=message):
        quick.main([*options, f"--out={out}"])
    for thread in {*threading.enumerate()} - before:
        if not thread.daemon:
            thread.join(timeout=10)
            assert not thread.is_alive(), thread
    assert "Traceback" not in capsys.readouterr().err
    assert names(kept) == {"checkpoint.1", "checkpoint.2"}


def test_two_runs_in_a_folder(
    quick: ModuleType, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one is refused, and the first one goes on."""
    refused = []

    def second_run() -> None:
        for more in ([], ["--resume"], ["--force"]):
            with pytest.raises(SystemExit, match="is in use by another run") as error:
                quick.main([*options, f"--out={tmp_path}", *more])
            refused.append(error)

    at_step(quick, monkeypatch, 2, second_run)
    assert quick.main([*options, f"--out={tmp_path}"]) == 0
    assert len(refused) == 3
    assert quick.main([*options, f"--out={tmp_path}", "--resume"]) == 0


@pytest.mark.parametrize("name", ["checkpoint.4", "model.safetensors", "log.json", "loss.png"])
def test_results_are_not_replaced(
    quick: ModuleType, options: list[str], out: Path, name: str
) -> None:
    for other in names(out) - {name}:
        path = out / other
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(SystemExit, match=f"has {name} of an earlier run; accepted are --resume"):
        quick.main([*options, f"--out={out}"])
    assert names(out) == {name}


def test_force(quick: ModuleType, options: list[str], out: Path) -> None:
    """The checkpoints are those of the new run."""
    assert quick.main([*options, f"--out={out}", "--force", "--steps=2"]) == 0
    assert names(out) == RESULTS | {"checkpoint.1", "checkpoint.2"}
    assert quick.main([*options, f"--out={out}", "--force", "--steps=1"]) == 0
    assert names(out) == RESULTS | {"checkpoint.1"}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES = {f.__name__: f for f in (flip_a_bit, cut, empty, Path.unlink)}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(
    quick: ModuleType, out: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is the newest, whichever file is damaged."""
    last, whole = out / "checkpoint.4", out / "whole"
    assert quick.outputs.checkpoints.newest(out) == 4
    last.rename(whole)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        shutil.copytree(whole, last)
        DAMAGES[damage](last / file)
        assert quick.outputs.checkpoints.newest(out) == 3
        assert f"{last} is damaged: " in capsys.readouterr().err
        shutil.rmtree(last)


def test_resume_after_damage(
    quick: ModuleType, options: list[str], out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on from the checkpoint before the damaged one, and writes that one again."""
    flip_a_bit(next((out / "checkpoint.4" / "d").iterdir()))
    assert quick.main([*options, f"--out={out}", "--resume"]) == 0
    shown = capsys.readouterr()
    assert "Continuing after step 3" in shown.out
    assert "checkpoint.4 is damaged: 'd/" in shown.err
    assert quick.outputs.checkpoints.newest(out) == 4

    for step in (3, 4):
        empty(out / f"checkpoint.{step}" / "record.json")
    with pytest.raises(SystemExit, match="has no whole checkpoint"):
        quick.main([*options, f"--out={out}", "--resume"])


def test_checkpoint_of_a_killed_run(quick: ModuleType, options: list[str], out: Path) -> None:
    """What a save has left that was not finished is neither resumed from nor in the way."""
    shutil.copytree(out / "checkpoint.4", out / "unfinished.orbax-checkpoint-tmp")
    (out / "checkpoint.4").rename(out / "unfinished")
    assert quick.main([*options, f"--out={out}", "--resume"]) == 0
    assert names(out) == RESULTS | {"checkpoint.3", "checkpoint.4"}


def test_model_is_written_first(
    quick: ModuleType, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens while text is decoded, the parameters are in the file."""

    def failing(*_: object) -> str:
        raise RuntimeError("no text")

    monkeypatch.setattr(quick.report, "sample", failing)
    with pytest.raises(RuntimeError, match="no text"):
        quick.main([*options, f"--out={tmp_path}"])
    assert "model.safetensors" in names(tmp_path)
