"""Files that would cost much to read, and damage that is noticed: `rwkv_jax.models` refuses them at
once, and the message names the file."""

import json
import os
import random
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import _commands, generation, models
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.checkpoints import Parameter, Storage, Tensor

INDEX = "model.safetensors.index.json"


def header(entries: bytes, contents: bytes = b"") -> Callable[[Path], Path]:
    """A writer of a safetensors file."""

    def write(folder: Path) -> Path:
        path = folder / "model.safetensors"
        checkpoints.write_header(path, entries, contents)
        return path

    return write


def pickled(program: bytes, storages: dict[str, bytes] | None = None) -> Callable[[Path], Path]:
    """A writer of a file of torch.save."""

    def write(folder: Path) -> Path:
        path = folder / "model.pth"
        checkpoints.write_archive(path, program, storages or {})
        return path

    return write


def members(folder: Path) -> Path:
    """A zip archive with 300,000 members, all of which are its first bytes."""
    count, path = 300_000, folder / "model.pth"
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<5H2I", 8, 0, 0, 0, 0, 0, 0)
    directory = b"".join(entry + b"%08x" % i for i in range(count))
    begin = b"PK\x03\x04" + bytes(26)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2**16 - 1, 2**16 - 1, len(directory), 30, 0)
    path.write_bytes(begin + directory + end)
    return path


def many_tensors(count: int) -> Callable[[Path], Path]:
    """Two tensors that tell the sizes of a model, and empty ones with the names of blocks."""
    sizes = {"emb.weight": ((4, 64), 0, 1024), "blocks.0.att.r_k": ((1, 64), 1024, 1280)}
    sizes |= {f"blocks.{i}.q": ((0,), 1280, 1280) for i in range(count)}
    entries = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": (begin, end)}
        for name, (shape, begin, end) in sizes.items()
    }
    return header(json.dumps(entries).encode(), bytes(1280))


def sparse(name: str, size: int) -> Callable[[Path], Path]:
    """A file of zeros that takes no space, in a folder for flash-linear-attention."""

    def write(folder: Path) -> Path:
        checkpoints.write_safetensors(
            folder / "model.safetensors", {"model.norm.bias": np.zeros(1, np.float32)}
        )
        with (folder / name).open("wb") as file:
            file.truncate(size)
        return folder

    return write


def pipe(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        sparse("other", 0)(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return folder

    return write


def shards(metadata: bytes, count: int, tensors: int) -> Callable[[Path], Path]:
    """An index of `count` files with so many tensors each, and something else."""

    def write(folder: Path) -> Path:
        entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
        for i in range(count):
            entries = [b'"%d.%d":%s' % (i, j, entry) for j in range(tensors)]
            text = b'{"__metadata__":%s,%s}' % (metadata, b",".join(entries))
            checkpoints.write_header(folder / f"{i}.safetensors", text, b"")
        files = {str(i): f"{i}.safetensors" for i in range(count)}
        (folder / INDEX).write_text(json.dumps({"weight_map": files}))
        return folder

    return write


MEBIBYTE = 2**20
COSTLY = {
    "header": (
        header(b"{" + b'"":{},' * 4 * MEBIBYTE + b'"":{}}'),
        "25165831 bytes that describe",
    ),
    "pickle": (pickled(b"}" * 16 * MEBIBYTE + b"."), "16777217 bytes that describe"),
    "members": (members, "its directory has 16200000 bytes; accepted"),
    "tensors": (many_tensors(10_000), "10002 tensors .*; accepted are at most 8192"),
    "blocks": (many_tensors(8_000), "8002 tensors; RWKV-7 with .* has 264003"),
    "shards": (shards(b"{}", 20, 1_000), "16.safetensors: with its 1000 tensors .* all files"),
    "large shards": (
        shards(b"[" + b"[]," * 500_000 + b"[]]", 20, 1),
        "1.safetensors: with its 1500076 bytes .* all files",
    ),
    "configuration": (sparse("config.json", 2**32), "config.json: the file has 4294967296 bytes"),
    "index": (sparse(INDEX, 2**40), f"{INDEX}: the file has 1099511627776 bytes; accepted"),
    "pipe as index": (pipe(INDEX), f"{INDEX}: the path is no regular file"),
    "pipe as configuration": (pipe("config.json"), "config.json: the path is no regular file"),
    "pipe as model": (pipe("model.safetensors"), "safetensors: the path is no regular file"),
}


def tensors_of_many_axes() -> bytes:
    """As many tensors as the instructions of a pickle can make of one storage."""
    plain = Tensor(Storage("0", np.zeros(1, np.float32)), (1,) * 32, (1,) * 32)
    program, _ = checkpoints.torch_pickle(plain)
    return program[:-1] + b"q\xff" + b"h\xff" * 250_000


LARGEST = {
    "objects": header(b'{"":[' + b"{}," * 690_000 + b"{}]}"),
    "names": header(b"{" + b",".join(b'"%x":{}' % i for i in range(190_000)) + b"}"),
    "instructions": pickled(b"}" * (2**19 - 1) + b"."),
    "axes": pickled(tensors_of_many_axes() + b"}.", {"0": bytes(4)}),
}
"""Just as large as is accepted before it is parsed."""


LOAD = """
import json, pathlib, sys, time, jax
from rwkv_jax import models

def peak():
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

jax.devices()
for path in sys.argv[1:]:
    before, start, message = peak(), time.process_time(), "nothing was raised"
    try:
        models.load(path)
    except ValueError as error:
        message = str(error)
    print(json.dumps([message, time.process_time() - start, peak() - before]), flush=True)
"""


def test_cost(tmp_path: Path) -> None:
    """In a process of its own, whose memory tells that of a call, and which may wait for ever."""
    cases = COSTLY | {case: (write, "") for case, write in LARGEST.items()}
    paths = []
    for case, (write, _) in cases.items():
        folder = tmp_path / case
        folder.mkdir()
        paths.append(str(write(folder)))
    command = [sys.executable, "-c", LOAD, *paths]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout
    for path, line, (case, (_, expected)) in zip(
        paths, lines.splitlines(), cases.items(), strict=True
    ):
        message, seconds, megabytes = json.loads(line)
        assert message.startswith(path), case
        assert re.search(expected, message), (case, message)
        # An idle processor takes less than 1 second.
        assert seconds < 3, case
        assert megabytes < 200, case


def test_a_model_of_many_blocks(tmp_path: Path) -> None:
    """No published model has more blocks."""
    tensors = checkpoints.rwkv7(layers=61, heads=1, head_size=2, vocabulary=3)
    path = tmp_path / "model.pth"
    checkpoints.write_pth(path, dict(checkpoints.state_dict(tensors, Parameter)))
    assert models.inspect(path).config.num_layers == 61


def test_a_state_of_another_model(tmp_path: Path) -> None:
    """A tuned state has as many blocks as the model."""
    path = tmp_path / "model.safetensors"
    checkpoints.write_safetensors(path, checkpoints.rwkv7())
    params = models.load(path).params
    states = {f"blocks.{i}.att.time_state": np.zeros((3, 8, 8), np.float32) for i in range(3)}
    checkpoints.write_safetensors(path, states)
    with pytest.raises(ValueError, match=r"1 tensors .*\n.*'blocks.2.att.time_state' in .* is \[3"):
        models.load_state(path, params)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_a_head_size_with_another_formula(tmp_path: Path, size: int) -> None:
    """The normalisation of flash-linear-attention has the eps of RWKV-LM for the head size 64."""
    tensors = checkpoints.rwkv7(heads=2, head_size=size, layers=1)
    path, folder = tmp_path / "model.safetensors", tmp_path / "folder"
    checkpoints.write_safetensors(path, checkpoints.fla(tensors))
    with pytest.raises(
        ValueError, match=rf"{path}: .*r_k' is \[2, {size}\]; accepted is \[H, 64\]"
    ):
        models.load(path)
    checkpoints.write_safetensors(path, tensors)
    params = models.load(path).params
    with pytest.raises(
        ValueError, match=rf"save: names is fla and r_k is \[2, {size}\]; accepted is \[H, 64\]"
    ):
        models.save(folder, params, names="fla")
    assert not folder.exists()


def test_flipped_bits(tmp_path: Path) -> None:
    """A flipped bit in any member but a large one is noticed."""
    path = tmp_path / "model.pth"
    tensors = {"x": np.arange(100, dtype=np.float32), "blocks.0.y": np.ones((30, 4), np.float32)}
    checkpoints.write_pth(path, checkpoints.state_dict(tensors))
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        parts = {x.filename: archive.read(x) for x in archive.infolist()}
    rng = random.Random(0)
    for name, part in parts.items():
        start = content.index(part, content.index(name.encode()))
        for _ in range(100 if name.endswith("pkl") else 10):
            damaged = bytearray(content)
            damaged[start + rng.randrange(len(part))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{path}: the member '{name}' has another check"):
                models.load(path)


def test_sizes_that_no_array_can_have(tmp_path: Path) -> None:
    path, message = tmp_path / "model.safetensors", r"'x' is \[0, 4611686018427387904\], which is"
    entry = {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}
    checkpoints.write_header(path, {"x": entry}, b"")
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        models.load(path)
    path = tmp_path / "model.pth"
    empty = Tensor(Storage("0", np.zeros(0, np.float32)), (0, 2**62), (1, 1))
    checkpoints.write_pth(path, {"x": empty})
    with pytest.raises(ValueError, match=f"{path}: {message}"):
        models.load(path)


def damaged(rng: random.Random, content: bytes) -> bytes:
    """A file with a few bytes changed."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(content))
        changed[at] = rng.choice([0, 255, rng.randrange(256), changed[at] ^ 1 << rng.randrange(8)])
    return bytes(changed)


@pytest.mark.parametrize("file", ["model.safetensors", "model.pth", "config.json", INDEX])
def test_each_message_names_the_file(tmp_path: Path, file: str) -> None:
    """And is of moderate length, without control characters."""
    tensors = {
        "model.norm.bias": np.ones(30, np.float32),
        "emb.weight": np.ones((5, 6), np.float32),
    }
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoints.write_pth(tmp_path / "model.pth", checkpoints.state_dict(tensors))
    config = {"model_type": "rwkv7", "hidden_act": "sqrelu", "norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    files = dict.fromkeys(tensors, "model.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": files}))
    path, rng = tmp_path / file, random.Random(0)
    content = path.read_bytes()
    for _ in range(200):
        path.write_bytes(damaged(rng, content))
        with pytest.raises(ValueError, match=f"^{tmp_path}") as error:
            models.load(path if file == "model.pth" else tmp_path)
        assert len(str(error.value)) < 1_000
        assert str(error.value).isprintable()


ESCAPE = "\x1b[2J\x9b\u202e"


def test_names_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether a name is that of a tensor, or that of a file in a folder or in an index."""
    tensors = {f"x{ESCAPE}": np.zeros(3, np.float32)}
    folders = [tmp_path / name for name in "abcd"]
    for folder in folders:
        folder.mkdir()
    checkpoints.write_safetensors(folders[0] / "model.safetensors", tensors)
    checkpoints.write_safetensors(folders[1] / f"{ESCAPE}.safetensors", tensors)
    for name in ("x", "y"):
        checkpoints.write_safetensors(folders[2] / f"{name}{ESCAPE}.safetensors", tensors)
    checkpoints.write_safetensors(folders[3] / f"{ESCAPE}.safetensors", tensors)
    files = dict.fromkeys(tensors, f"{ESCAPE}.safetensors")
    (folders[3] / INDEX).write_text(json.dumps({"weight_map": files}))
    for folder in folders:
        assert _commands.main(["inspect", str(folder)]) == 2
        error = capsys.readouterr().err
        assert error.removesuffix("\n").isprintable()
        assert r"\x1b[2J\x9b\u202e" in error


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "float8_e4m3fn", "x"])
@pytest.mark.usefixtures("unchecked_types")
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    """Nothing is rounded to integers, nor to a narrower dtype than was asked for."""
    path = tmp_path / "model.safetensors"
    checkpoints.write_safetensors(path, checkpoints.rwkv7(layers=1))
    params = models.load(path).params
    for what, call in {
        "load": lambda: models.load(path, dtype=dtype),
        "load_state": lambda: models.load_state(path, params, dtype=dtype),
        "rwkv7": lambda: rwkv7.initial_state(params, 1, dtype),
        "rwkv7.": lambda: rwkv7.apply(params, jnp.zeros((1, 2), jnp.int32), dtype=dtype),
        "load.": lambda: generation.load(path, rwkv7, params, dtype=dtype),
    }.items():
        message = (
            f"^{what.rstrip('.')}: dtype is '?{dtype}'?; accepted are float32, bfloat16, float16$"
        )
        with pytest.raises(TypeError, match=message):
            call()


def test_float64_where_it_is_enabled(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = checkpoints.rwkv7(layers=1)
    checkpoints.write_safetensors(path, tensors)
    with jax.enable_x64(True):
        params = models.load(path, dtype="float64").params
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float64")}
    np.testing.assert_array_equal(params.emb.weight, tensors["emb.weight"])
