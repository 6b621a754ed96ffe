"""Files that are damaged, that would run code or that would cost much to read: `rwkv_jax.models`
refuses them at once, and the message names the file."""

import json
import os
import random
import re
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import generation, models
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.checkpoints import INDEX, Parameter, Storage, Tensor
from support.commands import Command

Writer: TypeAlias = Callable[[Path], Path]

LARGE = 2**62
MEBIBYTE = 2**20


class Call:
    """A value that a pickle makes by calling a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def tensor(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0, key: str = "0"
) -> Tensor:
    """A tensor of a storage with 12 elements."""
    return Tensor(Storage(key, np.zeros(12, np.float32)), shape, strides, offset)


PLAIN = {"x": tensor((3, 4), (4, 1))}
SHARED = Storage("0", np.zeros(1000, np.float32))


def pickled(value: Any, **options: Any) -> Writer:
    """A writer of a file of torch.save."""
    return lambda folder: checkpoints.write_pth(folder / "model.pth", value, **options)


def program(instructions: bytes, storages: Mapping[str, bytes] = {}) -> Writer:
    """A writer of a file of torch.save, whose pickle has these instructions."""
    return lambda folder: checkpoints.write_archive(folder / "model.pth", instructions, storages)


def changed(change: Callable[[Path], object]) -> Writer:
    """A writer of a file of torch.save that is changed afterwards."""

    def write(folder: Path) -> Path:
        path = pickled(PLAIN)(folder)
        change(path)
        return path

    return write


def header(entries: Any, contents: int = 0, size: int | None = None) -> Writer:
    """A writer of a safetensors file with so many bytes of tensors."""
    return lambda folder: checkpoints.write_header(
        folder / "model.safetensors", entries, bytes(contents), size
    )


def index(files: Any) -> Writer:
    """A writer of an index beside two files with the tensor `x`."""

    def write(folder: Path) -> Path:
        (folder / "folder").mkdir()
        for name in ("model", "folder/a", "folder/b"):
            path = folder / f"{name}.safetensors"
            checkpoints.write_safetensors(path, {"x": np.zeros(3, np.float32)})
        (folder / "folder" / INDEX).write_text(json.dumps({"weight_map": files}))
        return folder / "folder" / INDEX

    return write


def global_(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


def edited(old: bytes, new: bytes, count: int = -1) -> Writer:
    return changed(lambda path: path.write_bytes(path.read_bytes().replace(old, new, count)))


def cut(size: int) -> Writer:
    return changed(lambda path: os.truncate(path, size))


def with_member(name: str, content: bytes) -> Writer:
    def add(path: Path) -> None:
        with warnings.catch_warnings(), zipfile.ZipFile(path, "a") as archive:
            warnings.filterwarnings("ignore", "Duplicate name")
            archive.writestr(name, content)

    return changed(add)


def overlapping(path: Path) -> None:
    """The directory says that one member is where another is."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        places = {info.filename: info.header_offset for info in archive.infolist()}
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"model/version"))
    content[at + 42 : at + 46] = places["model/byteorder"].to_bytes(4, "little")
    path.write_bytes(content)


ORDERED = global_("collections OrderedDict")
SYSTEM = r"refers to '(posix|nt).system', which was not executed"
ELEMENTS = {str(i): Tensor(SHARED, (1000,), (1,)) for i in range(9)}
ELSEWHERE = checkpoints.torch_pickle({"x": tensor((3, 4), (4, 1), key="../0")})[0]
INSTRUCTIONS, STORAGES = checkpoints.torch_pickle(PLAIN)
TWO = entry([2], 0, 8)
SIZES, OFFSETS = "no list of up to 32 sizes", "no list of two offsets"

VALUES = {
    "system": (Call(os.system, "false"), SYSTEM),
    "eval": ({"x": Call(eval, "1")}, "refers to '__builtin__.eval', which was not executed"),
    "nested": (PLAIN | {"y": {"z": Call(exec, "")}}, "refers to '__builtin__.exec'"),
    "class": ({"x": Path("/")}, "refers to 'pathlib"),
    "number": ({"x": 1.5}, "has a float under 'x'; accepted are tensors"),
    "nested tensors": ({"model": PLAIN}, "has a dict under 'model'"),
    "list": ([PLAIN["x"]], "is a list; accepted is a dictionary"),
    "key": ({1: PLAIN["x"]}, "has a int as a key"),
    "shared": (ELEMENTS, "the tensors have 36000 bytes together; accepted is up to twice"),
}
VIEWS = {
    "offset": (((3, 4), (4, 1), 1), "leaves its storage"),
    "negative offset": (((3, 4), (4, 1), -1), "without a storage, an offset"),
    "strides": (((3, 4), (5, 1)), "leaves its storage"),
    "negative strides": (((3, 4), (-4, 1)), "without a storage"),
    "large strides": (((2, 2), (LARGE, LARGE)), "leaves its storage"),
    "sizes": (((LARGE, LARGE), (1, 1)), "leaves its storage"),
    "repeated": (((LARGE,), (0,)), "more elements than its storage"),
    "negative sizes": (((-3, -4), (4, 1)), "without a storage"),
    "ranks": (((3, 4), (1,)), "without a storage"),
}
PROGRAMS = {
    "function": (ORDERED + b"}\x85R.", "calls collections.OrderedDict with other arguments"),
    "tensor": (global_("torch._utils _rebuild_tensor_v2") + b")R.", "with other arguments"),
    "text": (b"X\x01\x00\x00\x00x)R.", "calls a str"),
    "lookup": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "instruction SHORT_BINUNICODE"),
    "instance": (b"(ios\nsystem\n.", "instruction INST"),
    "attributes": (b"]}b.", "sets attributes of a list"),
    "twice": (b"}(X\x01\x00\x00\x00xNX\x01\x00\x00\x00xNu.", "has 'x' twice"),
    "memo": (b"}h\x07.", "is damaged"),
    "large memo": (b"}r\xff\xff\xff\x7f0.", "instruction POP"),
    "stack": (b"R.", "is damaged"),
    "mark": (b"}u.", "is damaged"),
    "end": (b"}", "pickle exhausted"),
    "length": (b"X\xff\xff\xff\x7fx.", "expected 2147483647 bytes"),
    "persistent": (b"X\x01\x00\x00\x00xQ.", "that is no storage"),
    "empty": (b"", "pickle exhausted"),
    "storage": (ELSEWHERE, "'x' is in the member 'model/data/../0', which is missing"),
    "complex": (global_("torch ComplexFloatStorage") + b".", "'torch.ComplexFloatStorage'"),
    "deep": (b")" + b"\x85" * 20_000 + b".", "is a tuple; accepted is a dictionary"),
}
ARCHIVES = {
    "compressed": (pickled(PLAIN, compression=zipfile.ZIP_DEFLATED), "data.pkl' is compressed"),
    "twice": (with_member("model/data/0", b""), "'model/data/0' occurs twice"),
    "two pickles": (with_member("other/data.pkl", b"}."), "2 members are a data.pkl"),
    "no pickle": (edited(b"data.pkl", b"dat_.pkl"), "0 members are a data.pkl"),
    "byte order": (pickled(PLAIN, byteorder=b"big"), "byte order is not little-endian"),
    "storage": (
        program(INSTRUCTIONS, {key: x + b"0" for key, x in STORAGES.items()}),
        "has 49 bytes; its storage has 48",
    ),
    "cut off": (cut(300), "the zip archive is damaged or cut off"),
    "short": (cut(6), "damaged or cut off"),
    "overlapping": (changed(overlapping), "overlap"),
    "no header": (edited(b"PK\x03\x04", b"PK\x03\x05", 2), "neither a file of torch.save nor"),
    "empty": (cut(0), "the file is empty"),
}
HEADERS = {
    "huge": (header(b"", size=2**63), "its header would have 9223372036854775808 bytes"),
    "long": (header(b"{}", size=3), "its header would have 3 bytes"),
    "no JSON": (header(b"{..."), "no valid JSON"),
    "no text": (header(b"{\xff}"), "no valid JSON"),
    "deep": (header(b"[" * 200_000), "no valid JSON"),
    "list": (header(b"[]"), "no JSON object"),
    "twice": (header(b'{"x": 1, "x": 2}'), "a name occurs twice"),
    "no entry": (header({"x": 1}), "other entries than"),
    "dtype": (header(entry([1], 0, 4, "F31"), 4), "has the dtype 'F31'"),
    "dtype list": (header(entry([1], 0, 4, []), 4), "has the dtype a list"),
    "outside": (header(TWO, 4), "ends at byte 8 of the tensors; they have 4"),
    "overlap": (header(TWO | {"y": entry([2], 4, 12)["x"]}, 12), "begins at byte 4"),
    "same": (header(TWO | {"y": TWO["x"]}, 8), "begins at byte 0"),
    "gap": (header(entry([1], 4, 8), 8), "begins at byte 4"),
    "rest": (header(entry([1], 0, 4), 8), "end at byte 4, and the file has 8 bytes"),
    "negative shape": (header(entry([-1, -1], 0, 4), 4), SIZES),
    "float shape": (header(entry([1.0], 0, 4), 4), SIZES),
    "axes": (header(entry([1] * 99, 0, 4), 4), SIZES),
    "large shape": (header(entry([2**40, 2**40], 0, 4), 4), "its dtype and shape need"),
    "backwards": (header(entry([1], 4, 0), 4), "has -4 bytes"),
    "negative": (header(entry([1], -4, 0), 4), OFFSETS),
    "boolean": (header(entry([True], False, 4), 4), SIZES),
}
INDICES = {
    "above": (index({"x": "../model.safetensors"}), "names '../model.safetensors'; accepted are"),
    "absolute": (index({"x": "/model.safetensors"}), "names '/model.safetensors'"),
    "backslash": (index({"x": "a\\b"}), "accepted are names of files beside it"),
    "folder": (index({"x": ".."}), "names '..'"),
    "number": (index({"x": 1}), "names ''"),
    "other": (index({"x": "other.safetensors"}), "there is no file 'other.safetensors' beside"),
    "empty": (index({}), "the index has no weight_map"),
    "list": (index([]), "the index has no weight_map"),
    "two files": (
        index({"x": "a.safetensors", "y": "b.safetensors"}),
        "'x' is in .* and in b.safetensors",
    ),
}
HOSTILE: dict[str, tuple[Writer, str]] = {
    f"{kind}: {case}": (write, message)
    for kind, several in {
        "value": {x: (pickled(value), message) for x, (value, message) in VALUES.items()},
        "view": {x: (pickled({"x": tensor(*y)}), message) for x, (y, message) in VIEWS.items()},
        "program": {x: (program(code), message) for x, (code, message) in PROGRAMS.items()},
        "archive": ARCHIVES,
        "header": HEADERS,
        "index": INDICES,
    }.items()
    for case, (write, message) in several.items()
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refused(tmp_path: Path, case: str) -> None:
    write, message = HOSTILE[case]
    path = write(tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        models.load(path)
    assert str(error.value).startswith(str(path.parent))


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder has no file"):
        models.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        models.load(tmp_path / "model.pth")
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"the folder has several checkpoints, 'a\.pth', 'b\.pth'"):
        models.load(tmp_path)


def members(folder: Path) -> Path:
    """A zip archive with 300,000 members, all of which are its first bytes."""
    count, path = 300_000, folder / "model.pth"
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<5H2I", 8, 0, 0, 0, 0, 0, 0)
    directory = b"".join(entry + b"%08x" % i for i in range(count))
    begin = b"PK\x03\x04" + bytes(26)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2**16 - 1, 2**16 - 1, len(directory), 30, 0)
    path.write_bytes(begin + directory + end)
    return path


def many_tensors(count: int) -> Writer:
    """Two tensors that tell the sizes of a model, and empty ones with the names of blocks."""
    sizes = {"emb.weight": ((4, 64), 0, 1024), "blocks.0.att.r_k": ((1, 64), 1024, 1280)}
    sizes |= {f"blocks.{i}.q": ((0,), 1280, 1280) for i in range(count)}
    return header({name: entry(*several)["x"] for name, several in sizes.items()}, 1280)


def sparse(name: str, size: int) -> Writer:
    """A file of zeros that takes no space, in a folder for flash-linear-attention."""

    def write(folder: Path) -> Path:
        checkpoints.write_safetensors(
            folder / "model.safetensors", {"model.norm.bias": np.zeros(1, np.float32)}
        )
        with (folder / name).open("wb") as file:
            file.truncate(size)
        return folder

    return write


def pipe(name: str) -> Writer:
    def write(folder: Path) -> Path:
        sparse("other", 0)(folder)
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        return folder

    return write


def shards(metadata: bytes, count: int, tensors: int) -> Writer:
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


COSTLY = {
    "header": (
        header(b"{" + b'"":{},' * 4 * MEBIBYTE + b'"":{}}'),
        "25165831 bytes that describe",
    ),
    "pickle": (program(b"}" * 16 * MEBIBYTE + b"."), "16777217 bytes that describe"),
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


OF_MANY_AXES = Tensor(Storage("0", np.zeros(1, np.float32)), (1,) * 32, (1,) * 32)
# As many tensors as the instructions of a pickle can make of one storage.
MANY_AXES = checkpoints.torch_pickle(OF_MANY_AXES)[0][:-1] + b"q\xff" + b"h\xff" * 250_000 + b"}."

LARGEST = {
    "objects": header(b'{"":[' + b"{}," * 690_000 + b"{}]}"),
    "names": header(b"{" + b",".join(b'"%x":{}' % i for i in range(190_000)) + b"}"),
    "instructions": program(b"}" * (2**19 - 1) + b"."),
    "axes": program(MANY_AXES, {"0": bytes(4)}),
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


@pytest.mark.slow
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
    write = pickled(dict(checkpoints.state_dict(tensors, Parameter)))
    assert models.inspect(write(tmp_path)).config.num_layers == 61


def test_a_state_of_another_model(tmp_path: Path) -> None:
    """A tuned state has as many blocks as the model."""
    path = checkpoints.write_model(tmp_path)
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
    empty = Tensor(Storage("0", np.zeros(0, np.float32)), (0, LARGE), (1, 1))
    for write in (header(entry([0, LARGE], 0, 0)), pickled({"x": empty})):
        path = write(tmp_path)
        with pytest.raises(ValueError, match=rf"{path}: 'x' is \[0, {LARGE}\], which is"):
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


def test_names_without_control_characters(tmp_path: Path, command: Command) -> None:
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
        error = command.refused("inspect", folder)
        assert error.removesuffix("\n").isprintable()
        assert r"\x1b[2J\x9b\u202e" in error


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "float8_e4m3fn", "x"])
@pytest.mark.usefixtures("unchecked_types")
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    """Nothing is rounded to integers, nor to a narrower dtype than was asked for."""
    path = checkpoints.write_safetensors(
        tmp_path / "model.safetensors", checkpoints.rwkv7(layers=1)
    )
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
