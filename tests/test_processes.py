"""Training in two processes equals training in one, checkpoints of one are those of the other, and
a run says how to go on when it has lost a process.

Run as a script, this file is one of two processes.
"""

import contextlib
import importlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from support import scripts, tolerance
from support.training import cheap_loss

TESTS = Path(__file__).parent
MODEL = ("--layers=1", "--width=32", "--head-size=16", "--batch=2", "--context=32")
MESH = "data=2,model=2"
"""Of two processes with two devices each. The first axis lies across the processes."""

SHORT = "--steps=4", "--save-every=2"
LONG = "--batch=4", "--steps=16", "--save-every=5"
"""Options of runs. The last two checkpoints are kept."""


def step(train: ModuleType, *options: str) -> dict[str, np.ndarray]:
    """The loss of a training step and every array that it changes. The parameters start with noise,
    because many of the initial ones are zero."""
    import jax

    steps = importlib.import_module("rwkv_jax._training.steps")
    place = train.devices.place
    args = train.options.parse([*MODEL, *options])
    model, _ = train.prepare(args)
    optimizer = sensitive(0.1)
    shapes = steps.state_shapes(model, optimizer)
    rng = np.random.default_rng(0)

    def with_noise(x: Any) -> Any:
        noise = 0.1 * rng.standard_normal(x.shape).astype(np.float32)
        return x + place(noise, x.sharding)

    initial = steps.initial_state(model, optimizer, shapes, seed=args.seed)
    params = jax.tree.map(with_noise, initial.params)
    state = initial._replace(params=params)
    text = rng.integers(0, 256, 1000).astype(np.uint8)
    batch = train.data.batch_at(0, text, seed=args.seed, batch=args.batch, context=args.context)
    placed = steps.on_mesh(train.data.windows(batch), model.mesh)
    state, measures = steps.train_step(model, optimizer, shapes, 0.0)(state, placed)
    results = {"loss": measures.loss, **steps.named(state)}
    return jax.tree.map(np.asarray, train.devices.gathered(results, model.mesh))


def sensitive(rate: float) -> Any:
    """An optimizer with a larger epsilon than usual, so that a step depends on how large a gradient
    is, and not on how one that should be zero is rounded."""
    import optax

    return optax.adamw(rate, eps=1e-3)


def trains(train: ModuleType, folder: Path, out: str, *options: str, cheaply: bool = False) -> None:
    """A run that computes its steps and nothing else, perhaps of a cheap loss."""
    given = f"--data={folder / 'text'}", f"--out={folder / out}", "--eval-tokens=64", "--cache=none"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "make_optimizer", lambda *_: sensitive(0.02))
        patch.setattr(train.loop, "evaluation", lambda *_: lambda _: 5.0)
        patch.setattr(train.report, "sample", lambda *_: "")
        patch.setattr(train.report, "plot", lambda *_: None)
        if cheaply:
            patch.setattr(train.loop.steps, "mean_loss", cheap_loss)
        assert train.main([*MODEL, *given, *options]) == 0


def works(folder: Path, index: str, implementation: str) -> None:
    """What each of two processes of Slurm does: it trains, without an option for processes; it
    resumes a run of one process; and it makes a step."""
    train = scripts.load(scripts.TRAIN)
    kernels = f"--implementation={implementation}"
    trains(train, folder, "two", *SHORT, "--mesh=data=2,seq=2", kernels)
    resumed = "--mesh=seq=2,model=2", "--resume"
    trains(train, folder, "one, then two", *SHORT, kernels, *resumed)
    results = step(train, f"--mesh={MESH}", kernels)
    np.savez(folder / index, allow_pickle=False, **results)


def is_lost(folder: Path, index: str, *options: str) -> None:
    """What each of two processes does, of which one is killed by itself before it takes the batch
    of a step."""
    *given, victim, last = options
    train = scripts.load(scripts.TRAIN)
    train.processes.HEARTBEAT = 8
    ahead = importlib.import_module("rwkv_jax._training.ahead").Ahead
    take = ahead.take

    def until_lost(batches: Any) -> Any:
        if index == victim and batches.number == int(last):
            os.kill(os.getpid(), signal.SIGKILL)
        return take(batches)

    ahead.take = until_lost
    given += [f"--process={index}", "--mesh=data=4"]
    trains(train, folder, "out", *LONG, *given, cheaply=True)


@pytest.fixture
def port() -> Iterator[int]:
    """A port that no other program is given during the test. The first process can listen at it,
    since gRPC shares ports as well."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        yield reserved.getsockname()[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    text = np.random.default_rng(0).integers(32, 127, 2000, np.uint8)
    (tmp_path / "text").write_bytes(text.tobytes())
    return tmp_path


def implementation() -> str:
    import rwkv_jax

    return "ffi" if rwkv_jax.build_info()["missing"]["cpu"] is None else "reference"


@contextlib.contextmanager
def two_processes(
    folder: Path, work: str, *options: str, env: dict[str, str] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with two devices each."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    shared = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | (env or {})
    # What pytest adds to the path of its own process.
    shared["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), shared.get("PYTHONPATH"))))
    runs = []
    for index in ("0", "1"):
        own = {"SLURM_PROCID": index, "SLURM_LOCALID": index}
        command = [sys.executable, __file__, work, str(folder), index, *options]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        runs.append(subprocess.Popen(command, env=shared | own, **pipes))
    try:
        yield runs
    finally:
        for run in runs:
            run.kill()
            run.wait()


def ended(runs: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """The exit status of each and its output, with that of the processes that it leaves."""
    outputs = [run.communicate(timeout=300)[0] for run in runs]
    return [run.returncode for run in runs], outputs


def arrays(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as opened:
        return dict(opened)


@pytest.mark.slow
def test_two_processes_train_as_one(folder: Path, port: int) -> None:
    """A step, and runs that resume with another number of processes."""
    from rwkv_jax import models

    slurm = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    slurm |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    slurm["JAX_COORDINATOR_PORT"] = str(port)
    kernels = f"--implementation={implementation()}"

    def unfinish(copy: str, of: str) -> None:
        shutil.copytree(folder / of, folder / copy)
        shutil.rmtree(folder / copy / "checkpoint.4")

    with scripts.running(scripts.TRAIN) as train:
        trains(train, folder, "one", *SHORT, kernels)
        unfinish("one, then two", "one")
        with two_processes(folder, "works", implementation(), env=slurm) as runs:
            expected = step(train, "--mesh=data=1", kernels)
            codes, outputs = ended(runs)
        assert codes == [0, 0], "\n".join(outputs)
        unfinish("two, then one", "two")
        trains(train, folder, "two, then one", *SHORT, kernels, "--mesh=model=2", "--resume")

    assert "optimizer.0.nu.blocks.0.att.receptance.weight" in expected
    for index in range(2):
        tolerance.assert_close(arrays(folder / f"{index}.npz"), expected, 1e-4)
    params = models.load(folder / "one" / "model.safetensors").params
    for out in ("two", "one, then two", "two, then one"):
        others = models.load(folder / out / "model.safetensors").params
        tolerance.assert_trees_close(others, params, 1e-4)
    assert "Continuing after step 2\n" in outputs[0]


@pytest.mark.slow
def test_a_lost_process(folder: Path, port: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The other one ends by itself, with a message that names the last checkpoint, and the run
    resumes from that one. JAX notices at once that the first process is lost, and of others that
    their heartbeat has stopped."""
    given = [f"--coordinator=localhost:{port}", "--processes=2"]
    for victim, last, checkpoint in ((1, 9, 5), (0, 14, 10)):
        with two_processes(folder, "is_lost", *given, str(victim), str(last)) as runs:
            codes, outputs = ended(runs)
        both = "\n".join(outputs)
        assert codes[victim] == -signal.SIGKILL, both
        assert codes[1 - victim] not in (0, -signal.SIGKILL), both
        resume = f"--resume continues from {folder / 'out'}/checkpoint.{checkpoint}\n"
        for index, output in enumerate(outputs):
            assert f"Process {index} of 2, on " in output
            assert output.endswith(resume)
        given += ["--resume"] if "--resume" not in given else []
    assert "Continuing after step 5\n" in both
    with scripts.running(scripts.TRAIN) as train:
        trains(train, folder, "out", *LONG, "--resume", cheaply=True)
    assert "Continuing after step 10\n" in capsys.readouterr().out


FAILS = """
import sys
from pathlib import Path
import jax
from rwkv_jax._training import processes
processes.count, jax.process_index, processes.HEARTBEAT = lambda: 2, lambda: 1, 0
with processes.watched(Path(sys.argv[1])):
    raise ValueError("an error of this process alone")
"""


def test_a_process_that_fails(tmp_path: Path) -> None:
    """It ends without waiting for the other one, which waits for it."""
    for step in ("9", "10", "10.orbax-checkpoint-tmp-0"):
        (tmp_path / f"checkpoint.{step}").mkdir()
    command = [sys.executable, "-c", FAILS, str(tmp_path)]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert run.returncode == 1
    assert "ValueError: an error of this process alone\nProcess 1 of 2, on " in run.stderr
    assert run.stderr.endswith(f"--resume continues from {tmp_path}/checkpoint.10\n")


STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}
HOSTS = STEP | {"SLURM_STEP_NUM_TASKS": "2"}
FOUND = {
    "alone": ({}, (), None),
    "a task of Slurm": (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, (), None),
    "the shell of an allocation": ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, (), None),
    "a pod without the package": ({"JOB_COMPLETION_INDEX": "0"}, (), None),
    "a run for each task": (STEP, (None, 1, None), None),
    "one of the tasks on its host": (STEP, (), "3"),
    "the only task on its host": (HOSTS, (), "all"),
    "a task with a GPU of its own": (STEP | {"CUDA_VISIBLE_DEVICES": "3"}, (), "all"),
    "a task with GPUs that are named": (HOSTS | {"JAX_LOCAL_DEVICE_IDS": "3"}, (), "3"),
    "of Open MPI": ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (), "3"),
    "options in Slurm": (STEP, ("host:1", 2, 0), "3"),
}
"""For each process its variables, its options, and the GPUs that JAX is to use if it is one of
several, where JAX itself would use the one of number 3."""


@pytest.mark.parametrize(("env", "given", "gpus"), FOUND.values(), ids=FOUND)
def test_who_finds_others(
    train: ModuleType,
    env: Mapping[str, str],
    given: tuple[Any, ...],
    gpus: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import jax

    for name in {x for x in os.environ if x.startswith(("SLURM_", "OMPI_", "CUDA_VISIBLE_"))}:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    used: dict[str, str] = {}
    initialize = Mock(side_effect=lambda *_, **__: used.update(jax_cuda_visible_devices="3"))
    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", used.__setitem__)
    options = given or (None, None, None)
    train.processes.connect(*options)
    assert used.get("jax_cuda_visible_devices") == gpus
    if gpus:
        assert initialize.call_args.args == options


def test_processes_that_are_not_found(train: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX knows no cluster here, though a variable says that others have been started."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    initialize = Mock(side_effect=ValueError("coordinator_address should be defined."))
    monkeypatch.setattr(sys.modules["jax"].distributed, "initialize", initialize)
    with pytest.raises(SystemExit, match=r"not found: coordinator_address .*\n.*--processes 1"):
        train.processes.connect(None, None, None)


if __name__ == "__main__":
    name, place, *rest = sys.argv[1:]
    {"works": works, "is_lost": is_lost}[name](Path(place), *rest)
