"""What train.py refuses before it starts, and its files: which run they belong to, and what happens
where they are damaged or cannot be written.

Most runs here have steps that compute nothing.
"""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from support import checkpoints, scripts
from support.scripts import AtStep
from support.training import measuring, without_computing

needs_devices = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
RESULTS = {"model.safetensors", "log.json", "loss.png", "metrics.jsonl"}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = tmp_path_factory.mktemp("data") / "text"
    text.write_bytes(b"the quick brown fox\n" * 100)
    given = {"layers": 1, "width": 32, "head-size": 16, "steps": 4, "batch": 2, "context": 16}
    given |= {"eval-tokens": 48, "save-every": 1, "cache": "none"}
    return [f"--data={text}", *(f"--{name}={x}" for name, x in given.items())]


@pytest.fixture(scope="module")
def finished(options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    with scripts.running(scripts.TRAIN) as train, pytest.MonkeyPatch.context() as patch:
        without_computing(train, patch)
        assert train.main([*options, f"--out={out}"]) == 0
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "out"))


@pytest.mark.parametrize("measure", ["loss", "norm of the gradients"])
def test_what_is_no_number(
    train: ModuleType,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measure: str,
) -> None:
    """The run ends before a checkpoint of that step is written, and keeps two, because the
    parameters of the newest one may be no numbers. The message names the documents of the batch."""
    without_computing(train, monkeypatch)
    values = [iter([jnp.float32(x) for x in (9, 8, 7, 6)]) for _ in range(2)]
    values[measure != "loss"] = iter([jnp.float32(x) for x in (9, 8, np.nan, 7)])
    measuring(train, monkeypatch, *(x.__next__ for x in values))
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(f"{json.dumps({'text': 'a word'})}\n" for _ in range(30)))
    places = rf"\({options[0].removeprefix('--data=')}: line 1, {lines}: line [0-9]+, .*\)"
    message = f"^The {measure} of step 3, with batch 2 of the data {places}, is nan; --resume "
    with pytest.raises(SystemExit, match=message):
        train.main([*options, f"--data={lines}", "--keep=1", f"--out={tmp_path / 'out'}"])
    tmp_path = tmp_path / "out"
    assert names(tmp_path) == {"checkpoint.1", "checkpoint.2", "metrics.jsonl"}


Run: TypeAlias = Callable[..., None]


@pytest.fixture
def run(train: ModuleType, options: list[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run into a folder, without computing, which has to succeed."""
    without_computing(train, monkeypatch)

    def run(out: Path, *more: str) -> None:
        assert train.main([*options, f"--out={out}", *more]) == 0

    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


REFUSED = {
    "steps batch judge layers": ["0", "-1", "x"],
    "warmup seed": ["-1", str(2**31), "0.5"],
    "learning-rate": ["nan", "inf", "-1", "1e39"],
    "weight-decay l2-wrap": ["nan", "-1"],
    "temperature": ["nan", "-1", "1e-7", "inf"],
    "growth": ["nan", "-1", "2"],
    "peak": ["nan", "0"],
    "prompt pattern out data model": [""],
    "prompt": ["\udcff"],
    "coordinator": ["", "host", "host:", ":1", "host:0", "host:65536"],
    "process": ["-1"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, x) for names, values in REFUSED.items() for name in names.split() for x in values],
)
def test_options_that_are_refused(
    train: ModuleType, name: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line names the option, what was given and what is accepted."""
    with pytest.raises(SystemExit, match=r"^2$"):
        train.options.parse([f"--{name}={value}"])
    assert f": error: argument --{name}: {value!r} is not " in capsys.readouterr().err


SEVERAL = "--coordinator=localhost:1 --processes=2"
MESHES = {
    "--mesh=data=1000": "--mesh has 1000 devices where there are .* at most that many",
    "--mesh=data=4": "data=4 where --batch is 2; accepted is what divides 2",
    "--mesh=seq=3": "seq=3 where --context is 16",
    "--mesh=model=4": "model=4 where the number of heads is 2",
}
TOGETHER = [
    *(pytest.param(*mesh, marks=needs_devices) for mesh in MESHES.items()),
    *(
        (f"--mesh={mesh}", "accepted are data=N, model=N and seq=N")
        for mesh in ("", "data", "data=0", "data=x", "batch=2", "data=2,data=2")
    ),
    (SEVERAL, "go together"),
    (f"{SEVERAL} --process=2", "accepted is 0 to 1"),
    ("--width=100", "hidden_size is 100; accepted is a multiple of head_size = 16"),
    ("--head-size=48", "hidden_size is 32; accepted is a multiple of head_size = 48"),
    ("--head-size=8 --implementation=ffi", "--implementation: .*'ffi' cannot run this call"),
    ("--train=lora", "there is no --model; accepted for a new one is --train all"),
    ("--resume --force", "not allowed with argument --resume"),
    ("--resume", "has no checkpoint; run without --resume"),
    ("--task=reverse", "--data and --task exclude each other"),
    ("--truncate", "--truncate needs --piece"),
    ("--piece=5", "--piece is 5 where --context is 16; accepted is a divisor"),
    ("--piece=1 --mesh=seq=2", "seq=2 where --piece is 1; accepted is a divisor of it"),
    ("--task=reverse --longest=4 --context=8", "--context is 8; documents need 9 or more"),
]


@pytest.mark.parametrize(("given", "message"), TOGETHER)
def test_options_that_do_not_go_together(
    train: ModuleType,
    options: list[str],
    given: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = options[1:] if "--context" in given else options  # the first one is --data
    with pytest.raises(SystemExit) as error:
        train.main([*others, f"--out={tmp_path}", *given.split(" ")])
    assert re.search(message, f"{error.value} {capsys.readouterr().err}")


def test_extreme_options_that_are_accepted(train: ModuleType) -> None:
    options = {"temperature": 0, "warmup": 0, "seed": 2**31 - 1, "l2_wrap": 0}
    args = train.options.parse([f"--{n.replace('_', '-')}={x}" for n, x in options.items()])
    assert vars(args).items() >= options.items()


def test_models_that_are_refused(train: ModuleType, tmp_path: Path) -> None:
    model, text = checkpoints.write_model(tmp_path, vocabulary=256), tmp_path / "text"
    os.truncate(model, model.stat().st_size - 1)
    text.write_text("a text")
    for path in (model, text, tmp_path, tmp_path / "missing.safetensors"):
        with pytest.raises(SystemExit, match="--model: "):
            train.options.config(train.options.parse([f"--model={path}"]))


def test_data_that_is_refused(train: ModuleType, tmp_path: Path) -> None:
    for folder, pattern, message in (
        (tmp_path / "missing", "*.py", "No such file"),
        (tmp_path, "*.py", "has 0 files"),
    ):
        with pytest.raises(SystemExit, match=message):
            train.data.read(folder, pattern)


def test_out_is_checked_before_work_starts(
    train: ModuleType, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "adapter").touch()
    monkeypatch.setattr(train, "run", None)
    for name in ("file", "file/out", "out", "old"):
        with pytest.raises(SystemExit, match=f"--out .*{name} cannot be written to: "):
            train.main([*options, f"--out={tmp_path / name}"])


@pytest.mark.parametrize("protected", [".", "model.safetensors", "log.json", "loss.png"])
def test_read_only_out(run: Run, out: Path, protected: str) -> None:
    (out / protected).chmod(0o500)
    if os.access(out / protected, os.W_OK):
        pytest.skip("the superuser writes to everything")
    with pytest.raises(SystemExit, match=r"cannot be written to: .*Permission denied"):
        run(out, "--force")
    (out / protected).chmod(0o700)


def test_failed_save(
    run: Run, at_step: AtStep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error, and no thread that keeps the process alive."""
    out, kept = tmp_path / "out", tmp_path / "kept"

    def replace_by_a_file() -> None:
        while not (out / "checkpoint.2").exists():
            time.sleep(0.01)
        out.rename(kept)
        out.touch()

    at_step(2, replace_by_a_file)
    before = set(threading.enumerate())
    message = r"checkpoint.3 cannot be written: .*Not a directory.*; --resume continues from .*\.2$"
    with pytest.raises(SystemExit, match=message):
        run(out)
    for thread in {*threading.enumerate()} - before:
        if not thread.daemon:
            thread.join(timeout=10)
            assert not thread.is_alive(), thread
    assert "Traceback" not in capsys.readouterr().err
    assert names(kept) == {"checkpoint.1", "checkpoint.2", "metrics.jsonl"}


def test_two_runs_in_a_folder(run: Run, at_step: AtStep, tmp_path: Path) -> None:
    """The second one is refused, and the first one goes on."""
    refused = []

    def second_run() -> None:
        for more in ((), ("--resume",), ("--force",)):
            with pytest.raises(SystemExit, match="is in use by another run") as error:
                run(tmp_path, *more)
            refused.append(error)

    at_step(2, second_run)
    run(tmp_path)
    assert len(refused) == 3
    run(tmp_path, "--resume")


@pytest.mark.parametrize("name", ["checkpoint.4", "model.safetensors", "log.json", "loss.png"])
def test_results_are_not_replaced(run: Run, out: Path, name: str) -> None:
    for other in names(out) - {name}:
        path = out / other
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(SystemExit, match=f"has {name} of an earlier run; accepted are --resume"):
        run(out)
    assert names(out) == {name}


def test_force(run: Run, out: Path) -> None:
    """The checkpoints are those of the new run."""
    run(out, "--force", "--steps=2")
    assert names(out) == RESULTS | {"checkpoint.1", "checkpoint.2"}
    run(out, "--force", "--steps=1")
    assert names(out) == RESULTS | {"checkpoint.1"}


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_a_bit,
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint(
    train: ModuleType, out: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one before it is the newest, whichever file is damaged."""
    last, whole = out / "checkpoint.4", out / "whole"
    assert train.outputs.checkpoints.newest(out) == 4
    last.rename(whole)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        shutil.copytree(whole, last)
        DAMAGES[damage](last / file)
        assert train.outputs.checkpoints.newest(out) == 3
        assert f"{last} is damaged: " in capsys.readouterr().err
        shutil.rmtree(last)


def test_resume_after_damage(
    train: ModuleType, run: Run, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run goes on from the checkpoint before the damaged one, and writes that one again."""
    flip_a_bit(next((out / "checkpoint.4" / "d").iterdir()))
    run(out, "--resume")
    shown = capsys.readouterr()
    assert "Continuing after step 3" in shown.out
    assert "checkpoint.4 is damaged: 'd/" in shown.err
    assert train.outputs.checkpoints.newest(out) == 4

    for step in (3, 4):
        os.truncate(out / f"checkpoint.{step}" / "record.json", 0)
    with pytest.raises(SystemExit, match="has no whole checkpoint"):
        run(out, "--resume")


def test_checkpoint_of_a_killed_run(run: Run, out: Path) -> None:
    """What a save has left that was not finished is neither resumed from nor in the way."""
    shutil.copytree(out / "checkpoint.4", out / "unfinished.orbax-checkpoint-tmp")
    (out / "checkpoint.4").rename(out / "unfinished")
    run(out, "--resume")
    assert names(out) == RESULTS | {"checkpoint.3", "checkpoint.4"}


def test_model_is_written_first(
    train: ModuleType, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever happens while text is decoded, the parameters are in the file."""
    monkeypatch.setattr(train.report, "sample", Mock(side_effect=RuntimeError("no text")))
    with pytest.raises(RuntimeError, match="no text"):
        run(tmp_path)
    assert "model.safetensors" in names(tmp_path)


def test_losses_are_read_late(
    train: ModuleType, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss is read when three later steps have been started, and in the end all are."""
    events: list[tuple[str, int]] = []

    class Loss:
        def __init__(self):
            self.step = sum(event == "started" for event, _ in events)
            events.append(("started", self.step))

        def copy_to_host_async(self) -> None:
            pass

        def __float__(self) -> float:
            events.append(("read", self.step))
            return 1.0 + self.step

    measuring(train, monkeypatch, Loss)
    run(tmp_path, "--steps=8", "--save-every=8")
    for i in range(4):
        assert events.index(("read", i)) == events.index(("started", i + 3)) + 1
    log = json.loads((tmp_path / "log.json").read_text())
    assert log["train"] == [1.0 + i for i in range(8)]


def test_training_goes_on_while_a_checkpoint_is_written(
    train: ModuleType, run: Run, at_step: AtStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = train.outputs.checkpoints
    third_step, write, waited = threading.Event(), checkpoints._write, []

    def write_later(*arguments: Any) -> list[int]:
        waited.append(third_step.wait(timeout=30))
        return write(*arguments)

    monkeypatch.setattr(checkpoints, "_write", write_later)
    at_step(2, third_step.set)
    run(tmp_path, "--save-every=2")
    assert waited == [True, True]
    assert checkpoints.newest(tmp_path) == 4


COUNTS = re.compile(r"(\d+) programs came from the cache, and (\d+) are new in it")


@pytest.mark.slow
def test_compiled_programs_are_kept(options: list[str], tmp_path: Path) -> None:
    """A second process compiles nothing before its second step, where each device has rows of its
    own."""
    script, cache = Path(scripts.SCRIPTS) / "train.py", tmp_path / "cache"
    options = [*options, f"--mesh=data={min(2, jax.device_count())}"]
    env = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "PYTHONUNBUFFERED": "1"}
    found = []
    for name in ("first", "second"):
        command = [sys.executable, script, *options, f"--cache={cache}", f"--out={tmp_path / name}"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout
            counts = next(filter(None, map(COUNTS.search, run.stdout)))
            run.kill()  # before it decodes and draws
        found.append([int(count) for count in counts.groups()])
    (cached, compiled), again = found
    assert compiled > cached == 0
    assert again == [compiled, 0]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A folder in which JAX keeps programs, however fast they compile."""
    options = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": str(tmp_path)}
    options |= {"jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in options}
    for values in (options, before):
        for name, value in values.items():
            jax.config.update(name, value)
        # JAX asks for the options once.
        compilation_cache.reset_cache()
        if values is options:
            yield tmp_path


@needs_devices
def test_programs_that_call_python_are_not_kept(cache: Path) -> None:
    """The next run could read one although its functions are others. The next program is kept."""
    compilation = importlib.import_module("rwkv_jax._training.compilation")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    x = jnp.ones((2, 4, 2, 16))

    def program(x: jax.Array) -> Any:
        return rwkv_jax.wkv7(x, -x, x, x, x, x, decay="log")

    kept = []
    for placed in (jax.device_put(x, NamedSharding(mesh, P("data"))), x):
        compilation.compiled(jax.jit(program).lower(placed))
        kept.append(len(list(cache.glob("jit_program*-cache"))))
    assert kept == [0, 1]
