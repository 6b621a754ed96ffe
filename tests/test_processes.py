"""A training step on the devices of several processes equals a step of one process on one device.

Run as a script, this file is one of the processes.
"""

import importlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support import scripts, tolerance

TESTS = Path(__file__).parent
MODEL = ("--layers=2", "--width=32", "--head-size=16", "--batch=2", "--context=32")
MESHES = ("data=2,seq=2", "seq=2,model=2", "data=2,model=2")
"""Meshes of two processes with two devices each. The first axis lies across the processes."""


def step(train: ModuleType, *options: str) -> dict[str, np.ndarray]:
    """The loss of a training step and every array that it changes. The parameters start with noise,
    because many of the initial ones are zero."""
    import jax
    import optax

    steps = importlib.import_module("rwkv_jax._training.steps")
    place = train.devices.place
    args = train.options.parse([*MODEL, *options])
    model, _ = train.prepare(args)
    # With a larger epsilon than usual, so that a step depends on how large a gradient is.
    optimizer = optax.adamw(0.1, eps=1e-3)
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
    placed = steps.on_mesh(train.data.Batch(batch), model.mesh)
    state, measures = steps.train_step(model, optimizer, shapes, 0.0)(state, placed)
    results = {"loss": measures.loss, **steps.named(state)}
    return jax.tree.map(np.asarray, train.devices.gathered(results, model.mesh))


def main(out: str, implementation: str, address: str, index: str) -> None:
    import jax

    train = scripts.load(scripts.TRAIN)
    jax.distributed.initialize(address, 2, int(index))
    for mesh in MESHES:
        results = step(train, f"--mesh={mesh}", f"--implementation={implementation}")
        np.savez(Path(out) / mesh, allow_pickle=False, **results)


@pytest.fixture
def address() -> Iterator[str]:
    """That of a port that no other program is given during the test. The first process can listen
    at it, since gRPC shares ports as well."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("", 0))
        yield f"localhost:{reserved.getsockname()[1]}"


@pytest.mark.slow
def test_two_processes_step_as_one(tmp_path: Path, address: str) -> None:
    import rwkv_jax

    missing = rwkv_jax.build_info()["missing"]["cpu"]
    implementation = "ffi" if missing is None else "reference"
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    # What pytest adds to the path of its own process.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), env.get("PYTHONPATH"))))
    outs, runs = [tmp_path / name for name in ("0", "1")], []
    for out in outs:
        out.mkdir()
        command = [sys.executable, __file__, str(out), implementation, address, out.name]
        with open(out / "output", "w") as output:
            runs.append(subprocess.Popen(command, stdout=output, stderr=output, env=env))
    try:
        with scripts.running(scripts.TRAIN) as train:
            expected = step(train, "--mesh=data=1", f"--implementation={implementation}")
        codes = [run.wait(timeout=300) for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
        output = "\n".join((out / "output").read_text() for out in outs)
    assert codes == [0, 0], output

    def results(out: Path, mesh: str) -> dict[str, np.ndarray]:
        with np.load(out / f"{mesh}.npz") as file:
            return dict(file)

    assert "optimizer.0.nu.blocks.1.att.receptance.weight" in expected
    for out, mesh in itertools.product(outs, MESHES):
        tolerance.assert_close(results(out, mesh), expected, 1e-4)


if __name__ == "__main__":
    main(*sys.argv[1:])
