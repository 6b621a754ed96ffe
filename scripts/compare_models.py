"""Compare the models of all generations with their formulas and with the official models.

    python scripts/compare_models.py                                     # small models
    python scripts/compare_models.py --versions RWKV-6 --width 512 --layers 4
    python scripts/compare_models.py --megabytes 400                     # the memory of load, too

Each model is a checkpoint of random numbers with the official names and shapes, which `models.load`
reads. Errors are ||x - right|| / ||right||, where right are the formulas in numpy in float64 (the
model in tests/support/language_models.py). The columns of the table:

    load      tensors of the file that the parameters have bit for bit
    prefill   the logits of a sequence
    decode    the logits of tokens one by one
    packed    the logits of two documents in one row
    train     the gradient of the loss: its product with a random direction in each tensor, against
              the difference of the loss along this direction
    sharded   the logits with the parameters on 2 x 2 devices, as `shardings` places them
    official  the logits of prefill and decode, against those of the `rwkv` package in float32;
              needs torch and rwkv

Exits with 1 where a tensor or an error is wrong: errors may be up to --tolerance.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "tests")]
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from benchmarking.processes import apart
from benchmarking.report import Table
from rwkv_jax import models
from rwkv_jax.losses import cross_entropy
from support import checkpoints, language_models
from support.tolerance import rms_error

HEAD_SIZE = 64
WIDTHS = 2 * HEAD_SIZE
"""The width is a multiple of it, so that two devices have the same number of heads."""
SEED = 0
STEP = 1e-6
"""How far a parameter moves for the difference of the loss. Its directions have elements of 1."""


class Sizes(NamedTuple):
    layers: int
    width: int
    vocabulary: int

    def tensors(self, version: str, dtype: str = "float32") -> checkpoints.Tensors:
        """A random checkpoint whose linear maps keep the size of what they map."""
        found = checkpoints.official(
            version,
            layers=self.layers,
            heads=self.width // HEAD_SIZE,
            head_size=HEAD_SIZE,
            vocabulary=self.vocabulary,
            dtype=dtype,
        )
        for name, x in found.items():
            if x.ndim == 2 and name.endswith(".weight") and name != "emb.weight":
                found[name] = x * np.asarray(x.shape[1] ** -0.5, x.dtype)
        return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare the models of all generations with formulas and official models.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    versions = tuple(checkpoints.MIXINGS)
    add("--versions", nargs="+", choices=versions, default=versions, help="which models")
    add("--layers", type=int, default=2, help="number of layers")
    add("--width", type=int, default=128, help=f"width of the model, a multiple of {WIDTHS}")
    add("--vocabulary", type=int, default=200, help="number of different tokens")
    add("--tokens", type=int, default=32, help="length of a sequence")
    add("--tolerance", type=float, default=1e-5, help="the largest error that is right")
    add("--megabytes", type=int, help="also load a bfloat16 file of this size and measure memory")
    args = parser.parse_args(argv)
    if args.width < 1 or args.width % WIDTHS:
        parser.error(f"--width is {args.width}; accepted is a multiple of {WIDTHS}")
    # The rwkv package finds the heads of RWKV-5 in the second layer.
    for name, least in {"layers": 2, "tokens": 4, "vocabulary": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} is {getattr(args, name)}; accepted is {least} or more")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    jax.config.update("jax_default_matmul_precision", "highest")
    sizes = Sizes(args.layers, args.width, args.vocabulary)
    official = all(importlib.util.find_spec(name) for name in ("torch", "rwkv"))
    if not official:
        print("torch or rwkv is not installed: no comparison with the official models")
    columns = ("load", "prefill", "decode", "packed", "train", "sharded", "official")
    table = Table("model", *columns, widths=(8, 7))
    right = True
    with tempfile.TemporaryDirectory() as folder:
        for version in args.versions:
            checkpoint = Compared(version, sizes.tensors(version), Path(folder), args.tokens)
            same, total = checkpoint.load()
            errors = {
                "prefill": checkpoint.prefill(),
                "decode": checkpoint.decode(),
                "packed": checkpoint.packed(),
                "train": checkpoint.train(),
                "sharded": checkpoint.sharded(),
            }
            if official:
                errors["official"] = checkpoint.official()
            right &= same == total and all(x <= args.tolerance for x in errors.values())
            table.row(version, f"{same}/{total}", *(f"{x:.1e}" for x in errors.values()))
        if args.megabytes:
            print()
            memory_table(args.versions, args.megabytes, Path(folder))
    return 0 if right else 1


class Compared:
    """A checkpoint, its parameters, and the right logits of a sequence."""

    def __init__(self, version: str, tensors: checkpoints.Tensors, folder: Path, length: int):
        self.version, self.path = version, folder / f"{version}.pth"
        checkpoints.write_pth(self.path, tensors)
        self.tensors = {
            name: x.reshape(-1) if x.shape[:2] == (1, 1) else x
            for name, x in tensors.items()
            if name not in checkpoints.UNUSED or version != "RWKV-7"
        }
        self.loaded = models.load(self.path)
        self.apply = jax.jit(self.loaded.module.apply)
        self.rng = np.random.default_rng(SEED)
        self.tokens = self.rng.integers(0, len(tensors["emb.weight"]), length)
        self.right = self.formulas(self.tensors, self.tokens)

    @property
    def row(self) -> jax.Array:
        return jnp.asarray(self.tokens[None], jnp.int32)

    def formulas(self, tensors: Any, tokens: np.ndarray) -> np.ndarray:
        generation = self.loaded.module.__name__.rpartition(".")[2]
        return language_models.logits(generation, tensors, tokens)

    def load(self) -> tuple[int, int]:
        """How many tensors of the file the parameters have, and how many the file has."""
        found = self.loaded.module.names(self.loaded.params)
        same = (
            name in found and np.array_equal(found[name], x, equal_nan=True)
            for name, x in self.tensors.items()
        )
        return sum(same), len(self.tensors)

    def prefill(self) -> float:
        logits, _ = self.apply(self.loaded.params, self.row)
        return rms_error(logits[0], self.right)

    def decode(self) -> float:
        return rms_error(self.decoded(0), self.right)

    def decoded(self, prompt: int) -> np.ndarray:
        """The logits of all tokens, of which the first `prompt` are read as a sequence."""
        params, module = self.loaded.params, self.loaded.module
        state, found = module.initial_state(params, 1), []
        if prompt:
            logits, state = self.apply(params, self.row[:, :prompt], state)
            found.append(logits[0])
        for i in range(prompt, len(self.tokens)):
            logits, state = self.apply(params, self.row[:, i], state)
            found.append(logits)
        return np.concatenate([np.asarray(x) for x in found])

    def packed(self) -> float:
        """The first document is the longer one."""
        cut = len(self.tokens) * 2 // 3
        ids = jnp.where(jnp.arange(len(self.tokens)) < cut, 1, 2)[None].astype(jnp.int32)
        logits, _ = self.apply(self.loaded.params, self.row, segment_ids=ids)
        second = self.formulas(self.tensors, self.tokens[cut:])
        return rms_error(logits[0], np.concatenate([self.right[:cut], second]))

    def train(self) -> float:
        module, params = self.loaded.module, self.loaded.params

        @jax.jit
        @jax.grad
        def gradient(params: Any) -> jax.Array:
            hidden_states, _ = module.hidden_states(params, self.row[:, :-1])
            return cross_entropy(hidden_states, params.head.weight, self.row[:, 1:])

        def loss(name: str, x: np.ndarray) -> float:
            logits = self.formulas(self.tensors | {name: x}, self.tokens[:-1])
            highest = logits.max(1)
            sums = highest + np.log(np.exp(logits - highest[:, None]).sum(1))
            return float((sums - logits[np.arange(len(logits)), self.tokens[1:]]).mean())

        found, right = [], []
        for name, slope in module.names(gradient(params)).items():
            x = self.tensors[name].astype(np.float64)
            direction = self.rng.choice((-1.0, 1.0), x.shape)
            found.append(np.vdot(np.asarray(slope, np.float64), direction))
            ahead, behind = (loss(name, x + step * direction) for step in (STEP, -STEP))
            right.append((ahead - behind) / (2 * STEP))
        return rms_error(np.array(found), np.array(right))

    def sharded(self) -> float:
        mesh = jax.make_mesh(
            (2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=jax.devices()[:4]
        )
        params = models.load(self.path, mesh=mesh, data="data", model="model").params
        logits, _ = self.apply(params, self.row)
        return rms_error(logits[0], self.right)

    def official(self) -> float:
        from support import official

        prompt = len(self.tokens) // 2
        with contextlib.redirect_stdout(io.StringIO()):
            right = official.run(self.version, self.path, self.tokens.tolist(), prompt)
        return rms_error(self.decoded(prompt), right.logits)


def memory_table(versions: Sequence[str], megabytes: int, folder: Path) -> None:
    """Load a bfloat16 file of each version in a process of its own. Memory is that of the process
    without the pages of the mapped file, which the system takes back when it needs them."""
    table = Table(
        "MB of load", "file", "largest tensor", "parameters", "peak", "seconds", widths=(10, 7)
    )
    for version in versions:
        path = folder / "large.pth"
        largest = write_large(path, version, megabytes)
        found = apart(measured_load, path)
        cells = (path.stat().st_size, largest, found.parameters, found.peak)
        table.row(version, *(f"{x / 1e6:.0f}" for x in cells), f"{found.seconds:.1f}")


def write_large(path: Path, version: str, megabytes: int) -> int:
    """Write a model with as many layers as make a file of this size; the bytes of its largest
    tensor."""

    def tensors(layers: int) -> checkpoints.Tensors:
        return Sizes(layers, width=1024, vocabulary=8192).tensors(version, "bfloat16")

    one, two = (sum(x.nbytes for x in tensors(layers).values()) for layers in (1, 2))
    made = tensors(max(1, 1 + round((megabytes * 1e6 - one) / (two - one))))
    checkpoints.write_pth(path, made)
    return max(x.nbytes for x in made.values())


class Load(NamedTuple):
    """The bytes of the parameters, the largest number of bytes that `load` added to the memory of
    its process, and how long it took."""

    parameters: int
    peak: int
    seconds: float


def measured_load(path: Path) -> Load:
    jnp.zeros(1).block_until_ready()
    before, peak, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(1e-3):
            peak = max(peak, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    params = models.load(path).params
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    parameters = sum(x.nbytes for x in jax.tree.leaves(params))
    return Load(parameters, max(peak, anonymous()) - before, seconds)


def anonymous() -> int:
    """The bytes of memory of this process that belong to no file (Linux)."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
