"""Files that are damaged, that would run code or that would cost much to read: `rwkv_jax.models`
refuses them at once, and the message names the file."""

import io
import json
import os
import random
import re
import struct
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import generation, models
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.checkpoints import INDEX, Call, Storage, archive, safetensors, torch_file
from support.commands import Command

LARGE = 2**62


def tensor(*place: Any, key: str = "0") -> Call:
    """A tensor of a storage with 12 elements."""
    return checkpoints.tensor(Storage(key, np.zeros(12, np.float32)), *place)


PLAIN = {"x": tensor((3, 4), (4, 1))}
CONTENT = torch_file(PLAIN)


def with_member(name: str, content: bytes) -> bytes:
    """The file of torch.save with another member."""
    file = io.BytesIO(CONTENT)
    with warnings.catch_warnings(), zipfile.ZipFile(file, "a") as opened:
        warnings.filterwarnings("ignore", "Duplicate name")
        opened.writestr(name, content)
    return file.getvalue()


def overlapping() -> bytes:
    """The directory says that one member is where another is."""
    content = bytearray(CONTENT)
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        place = opened.getinfo("model/byteorder").header_offset
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(b"model/version"))
    content[at + 42 : at + 46] = place.to_bytes(4, "little")
    return bytes(content)


def entry(shape: Any, begin: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


ORDERED = b"ccollections\nOrderedDict\n"
SYSTEM = r"refers to '(posix|nt).system', which was not executed"
SHARED = Storage("0", np.zeros(1000, np.float32))
ELEMENTS = {str(i): checkpoints.tensor(SHARED, (1000,), (1,)) for i in range(9)}
ELSEWHERE = checkpoints.torch_pickle({"x": tensor((3, 4), (4, 1), key="../0")})[0]
INSTRUCTIONS, STORAGES = checkpoints.torch_pickle(PLAIN)
TWO = entry([2], 0, 8)
SIZES, OFFSETS = "no list of up to 32 sizes", "no list of two offsets"

VALUES = {
    "system": (Call(os.system, "false"), SYSTEM),
    "eval": ({"x": Call(eval, "1")}, "refers to '__builtin__.eval', which was not executed"),
    "class": ({"x": Path("/")}, "refers to 'pathlib"),
    "number": ({"x": 1.5}, "has a float under 'x'; accepted are tensors"),
    "nested tensors": ({"layers": PLAIN}, "has a dict under 'layers'"),
    "two models": ({"model": PLAIN, "module": PLAIN}, "models under 'model' and 'module'"),
    "key of a model": ({"model": {1: PLAIN["x"]}}, "has a int as a key"),
    "code beside a model": ({"model": PLAIN, "x": Call(os.system, "false")}, SYSTEM),
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
    "no array": (((0, LARGE), (1, 1)), rf"'x' is \[0, {LARGE}\], which is"),
}
PROGRAMS = {
    "function": (ORDERED + b"}\x85R.", "calls collections.OrderedDict with other arguments"),
    "tensor": (b"ctorch._utils\n_rebuild_tensor_v2\n)R.", "with other arguments"),
    "text": (b"X\x01\x00\x00\x00x)R.", "calls a str"),
    "lookup": (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "refers to 'os.system', which was not"),
    "lookup of a number": (b"\x80\x04K\x01\x8c\x06system\x93.", "a int in place of the name"),
    "frozen set": (b"\x80\x04(\x91.", "instruction FROZENSET"),
    "tuple as a key": (b"})Ns.", "has a tuple as a key"),
    "instance": (b"(ios\nsystem\n.", "instruction INST"),
    "attributes": (b"]}b.", "sets attributes of a list"),
    "twice": (b"}(X\x01\x00\x00\x00xNX\x01\x00\x00\x00xNu.", "has 'x' twice"),
    "memo": (b"}h\x07.", "is damaged"),
    "large memo": (b"}r\xff\xff\xff\x7f0.", "instruction POP"),
    "stack": (b"R.", "is damaged"),
    "end": (b"}", "pickle exhausted"),
    "length": (b"X\xff\xff\xff\x7fx.", "expected 2147483647 bytes"),
    "persistent": (b"X\x01\x00\x00\x00xQ.", "that is no storage"),
    "storage": (ELSEWHERE, "'x' is in the member 'model/data/../0', which is missing"),
    "complex": (b"ctorch\nComplexFloatStorage\n.", "'torch.ComplexFloatStorage'"),
    "deep": (b")" + b"\x85" * 20_000 + b".", "is a tuple; accepted is a dictionary"),
}
ARCHIVES = {
    "compressed": (torch_file(PLAIN, compression=zipfile.ZIP_DEFLATED), "data.pkl' is compressed"),
    "twice": (with_member("model/data/0", b""), "'model/data/0' occurs twice"),
    "two pickles": (with_member("other/data.pkl", b"}."), "2 members are a data.pkl"),
    "no pickle": (CONTENT.replace(b"data.pkl", b"dat_.pkl"), "0 members are a data.pkl"),
    "byte order": (torch_file(PLAIN, byteorder=b"big"), "byte order is not little-endian"),
    "storage": (
        archive(INSTRUCTIONS, {key: x + b"0" for key, x in STORAGES.items()}),
        "has 49 bytes; its storage has 48",
    ),
    "cut off": (CONTENT[:300], "the zip archive is damaged, cut off or too large"),
    "short": (CONTENT[:6], "damaged, cut off or too large"),
    "overlapping": (overlapping(), "overlap"),
    "no header": (
        CONTENT.replace(b"PK\x03\x04", b"PK\x03\x05", 2),
        "neither a file of torch.save nor",
    ),
    "empty": (b"", "the file is empty"),
}
HEADERS = {
    "huge": (safetensors(b"", size=2**63), "its header would have 9223372036854775808 bytes"),
    "long": (safetensors(b"{}", size=3), "its header would have 3 bytes"),
    "no JSON": (safetensors(b"{..."), "no valid JSON"),
    "no text": (safetensors(b"{\xff}"), "no valid JSON"),
    "deep": (safetensors(b"[" * 200_000), "no valid JSON"),
    "list": (safetensors(b"[]"), "no JSON object"),
    "twice": (safetensors(b'{"x": 1, "x": 2}'), "a name occurs twice"),
    "no entry": (safetensors({"x": 1}), "other entries than"),
    "dtype": (safetensors(entry([1], 0, 4, "F31"), bytes(4)), "has the dtype 'F31'"),
    "dtype list": (safetensors(entry([1], 0, 4, []), bytes(4)), "has the dtype a list"),
    "outside": (safetensors(TWO, bytes(4)), "ends at byte 8 of the tensors; they have 4"),
    "overlap": (safetensors(TWO | {"y": entry([2], 4, 12)["x"]}, bytes(12)), "begins at byte 4"),
    "gap": (safetensors(entry([1], 4, 8), bytes(8)), "begins at byte 4"),
    "rest": (safetensors(entry([1], 0, 4), bytes(8)), "end at byte 4, and the file has 8 bytes"),
    "negative shape": (safetensors(entry([-1, -1], 0, 4), bytes(4)), SIZES),
    "float shape": (safetensors(entry([1.0], 0, 4), bytes(4)), SIZES),
    "axes": (safetensors(entry([1] * 99, 0, 4), bytes(4)), SIZES),
    "large shape": (safetensors(entry([2**40, 2**40], 0, 4), bytes(4)), "its dtype and shape need"),
    "backwards": (safetensors(entry([1], 4, 0), bytes(4)), "has -4 bytes"),
    "negative": (safetensors(entry([1], -4, 0), bytes(4)), OFFSETS),
    "no array": (safetensors(entry([0, LARGE], 0, 0)), rf"'x' is \[0, {LARGE}\], which is"),
    "boolean": (safetensors(entry([True], False, 4), bytes(4)), SIZES),
}
CONTENTS = {f"value: {x}": (torch_file(value), text) for x, (value, text) in VALUES.items()}
CONTENTS |= {f"view: {x}": (torch_file({"x": tensor(*y)}), z) for x, (y, z) in VIEWS.items()}
CONTENTS |= {f"program: {x}": (archive(code), text) for x, (code, text) in PROGRAMS.items()}
CONTENTS |= {f"archive: {x}": case for x, case in ARCHIVES.items()}
CONTENTS |= {f"header: {x}": case for x, case in HEADERS.items()}


@pytest.mark.parametrize("case", CONTENTS)
def test_contents(tmp_path: Path, case: str) -> None:
    content, message = CONTENTS[case]
    path = tmp_path / "model"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        models.load(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"x": "../model.safetensors"}, "names '../model.safetensors'; accepted are"),
        ({"x": "/model.safetensors"}, "names '/model.safetensors'"),
        ({"x": "a\\b"}, "accepted are names of files beside it"),
        ({"x": ".."}, "names '..'"),
        ({"x": 1}, "names ''"),
        ({"x": "other.safetensors"}, "there is no file 'other.safetensors' beside"),
        ({}, "the index has no weight_map"),
        (
            {str(i): str(i) for i in range(1025)},
            "with its 1025 files .*; accepted are at most 1024",
        ),
        ([], "the index has no weight_map"),
        ({"x": "a.safetensors", "y": "b.safetensors"}, "'x' is in .* and in b.safetensors"),
    ],
)
def test_indices(tmp_path: Path, files: Any, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for path in (tmp_path / "model", folder / "a", folder / "b"):
        tensors = {"x": np.zeros(3, np.float32)}
        checkpoints.write_safetensors(path.with_suffix(".safetensors"), tensors)
    with pytest.raises(ValueError, match=message) as error:
        models.load(checkpoints.write_index(folder, files))
    assert str(error.value).startswith(str(folder))


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the folder has no file"):
        models.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        models.load(tmp_path / "model.pth")
    for name in ("a.pth", "b.pth"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"the folder has several checkpoints, 'a\.pth', 'b\.pth'"):
        models.load(tmp_path)


def many_members(count: int, extra: int = 0) -> bytes:
    """A zip archive with so many members, all of which are its first bytes, and with extra fields
    of so many bytes."""
    entry = b"PK\x01\x02" + bytes(24) + struct.pack("<5H2I", 8, extra, 0, 0, 0, 0, 0)
    directory = b"".join(entry + b"%08x" % i + bytes(extra) for i in range(count))
    begin = b"PK\x03\x04" + bytes(26)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 2**16 - 1, 2**16 - 1, len(directory), 30, 0)
    return begin + directory + end


def many_tensors(count: int) -> bytes:
    """Two tensors that tell the sizes of a model, and empty ones with the names of blocks."""
    sizes = {"emb.weight": ((4, 64), 0, 1024), "blocks.0.att.r_k": ((1, 64), 1024, 1280)}
    sizes |= {f"blocks.{i}.q": ((0,), 1280, 1280) for i in range(count)}
    return safetensors({name: entry(*several)["x"] for name, several in sizes.items()}, bytes(1280))


def many_axes() -> bytes:
    """As many tensors as the instructions of a pickle can make of one storage."""
    tensor = checkpoints.tensor(Storage("0", np.zeros(1, np.float32)), (1,) * 32, (1,) * 32)
    code = checkpoints.torch_pickle(tensor)[0][:-1] + b"q\xff" + b"h\xff" * 250_000 + b"}."
    return archive(code, {"0": bytes(4)})


def write_parts(folder: Path, metadata: bytes, tensors: int) -> None:
    """An index of 20 files with so many tensors each, and something else."""
    folder.mkdir()
    entry = b'{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    for i in range(20):
        entries = [b'"%d.%d":%s' % (i, j, entry) for j in range(tensors)]
        text = b'{"__metadata__":%s,%s}' % (metadata, b",".join(entries))
        (folder / f"{i}.safetensors").write_bytes(safetensors(text))
    checkpoints.write_index(folder, {str(i): f"{i}.safetensors" for i in range(20)})


def write_costly(folder: Path) -> dict[str, str]:
    """Files and folders that would cost much to read, and the messages about them."""
    repeated = b',"":{}' * 2**22
    names = b",".join(b'"%x":{}' % i for i in range(190_000))
    files = {
        "header": (safetensors(b'{"":{}' + repeated + b"}"), "25165831 bytes that describe"),
        "pickle": (archive(b"}" * 2**24 + b"."), "16777217 bytes that describe"),
        "members": (many_members(300_000), "the directory: with its 16200000 bytes"),
        "extra fields": (many_members(31, 65_532), "an extra field has 65532 bytes; accepted"),
        "tensors": (many_tensors(10_000), "10002 tensors .*; accepted are at most 8192"),
        "blocks": (many_tensors(8_000), "8002 tensors; RWKV-7 with .* has 264003"),
        # Just as large as is accepted before it is parsed.
        "objects": (safetensors(b'{"":[' + b"{}," * 690_000 + b"{}]}"), ""),
        "names": (safetensors(b"{" + names + b"}"), ""),
        "instructions": (archive(b"}" * 327_679 + b"."), ""),
        "axes": (many_axes(), ""),
    }
    for name, (content, _) in files.items():
        (folder / name).write_bytes(content)
    write_parts(folder / "shards", b"{}", 1_000)
    write_parts(folder / "large shards", b"[" + b"[]," * 500_000 + b"[]]", 1)
    (folder / "archives").mkdir()
    for i in range(4):
        code, storages = checkpoints.torch_pickle({str(i): PLAIN["x"]})
        (folder / "archives" / f"{i}.pth").write_bytes(archive(b"}" * 150_000 + code, storages))
    checkpoints.write_index(folder / "archives", {str(i): f"{i}.pth" for i in range(4)})
    return {name: message for name, (_, message) in files.items()} | {
        "shards": "16.safetensors: with its 1000 tensors all files",
        "archives": r"2.pth: the pickle: with its \d+ instructions .* all files",
        "large shards": "1.safetensors: with its 1500076 bytes .* all files",
    }


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
    """In a process of its own, whose memory tells that of a call."""
    messages = write_costly(tmp_path)
    command = [sys.executable, "-c", LOAD, *(str(tmp_path / name) for name in messages)]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout
    for (name, expected), line in zip(messages.items(), lines.splitlines(), strict=True):
        message, seconds, megabytes = json.loads(line)
        assert message.startswith(str(tmp_path / name))
        assert re.search(expected, message), (name, message)
        # An idle processor takes less than 1 second.
        assert seconds < 3, name
        assert megabytes < 200, name


@pytest.mark.parametrize("name", [INDEX, "config.json", "model.safetensors"])
def test_files_that_are_not_read(tmp_path: Path, name: str) -> None:
    """A device, instead of a pipe, which might wait for ever, and a large file of zeros."""
    tensors, path = {"model.norm.bias": np.zeros(1, np.float32)}, tmp_path / name
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors)
    path.unlink(missing_ok=True)
    path.symlink_to(os.devnull)
    with pytest.raises(ValueError, match=f"{name}: the path is no regular file"):
        models.load(tmp_path)
    if name != "model.safetensors":  # of which the header is read alone
        path.unlink()
        path.touch()
        os.truncate(path, 2**40)
        with pytest.raises(ValueError, match=f"{name}: the file has 1099511627776 bytes; accepted"):
            models.load(tmp_path)


@pytest.mark.slow
def test_a_model_of_many_blocks(tmp_path: Path) -> None:
    """No published model has more blocks."""
    tensors = checkpoints.rwkv7(layers=61, heads=1, head_size=2, vocabulary=3)
    path = tmp_path / "model.pth"
    path.write_bytes(torch_file(dict(checkpoints.state_dict(tensors, checkpoints.parameter))))
    assert models.inspect(path).config.num_layers == 61


@pytest.mark.parametrize("size", [8, 32, 128])
def test_a_head_size_with_another_formula(tmp_path: Path, size: int) -> None:
    """The normalisation of flash-linear-attention has the eps of RWKV-LM for the head size 64."""
    tensors = checkpoints.rwkv7(heads=2, head_size=size, layers=1)
    path = tmp_path / "model.safetensors"
    checkpoints.write_safetensors(path, checkpoints.fla(tensors))
    message = rf"{path}: .*r_k' is \[2, {size}\]; accepted is \[H, 64\]"
    with pytest.raises(ValueError, match=message):
        models.load(path)


def test_flipped_bits(tmp_path: Path) -> None:
    """A flipped bit in any member but a large one is noticed."""
    path, rng = tmp_path / "model.pth", random.Random(0)
    tensors = {"x": np.arange(100, dtype=np.float32), "blocks.0.y": np.ones((30, 4), np.float32)}
    content = torch_file(checkpoints.state_dict(tensors))
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        parts = {name: opened.read(name) for name in opened.namelist()}
    for name, part in parts.items():
        start = content.index(part, content.index(name.encode()))
        for _ in range(100 if name.endswith("pkl") else 10):
            damaged = bytearray(content)
            damaged[start + rng.randrange(len(part))] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=f"{path}: the member '{name}' has another check"):
                models.load(path)


@pytest.mark.parametrize("file", ["model.safetensors", "model.pth", "config.json", INDEX])
def test_each_message_names_the_file(tmp_path: Path, file: str) -> None:
    """And is of moderate length, without control characters, whichever bytes are changed."""
    tensors = {name: np.ones((5, 6), np.float32) for name in ("model.norm.bias", "emb.weight")}
    checkpoints.write_safetensors(tmp_path / "model.safetensors", tensors)
    checkpoints.write_pth(tmp_path / "model.pth", tensors)
    config = {"model_type": "rwkv7", "hidden_act": "sqrelu", "norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoints.write_index(tmp_path, dict.fromkeys(tensors, "model.safetensors"))
    path, rng = tmp_path / file, random.Random(0)
    content = path.read_bytes()
    for _ in range(200):
        changed = bytearray(content)
        for at in rng.choices(range(len(content)), k=rng.randint(1, 3)):
            flipped = changed[at] ^ 1 << rng.randrange(8)
            changed[at] = rng.choice([0, 255, rng.randrange(256), flipped])
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"^{tmp_path}") as error:
            models.load(path if file == "model.pth" else tmp_path)
        assert len(str(error.value)) < 1_000
        assert str(error.value).isprintable()


def test_names_without_control_characters(tmp_path: Path, command: Command) -> None:
    """Whether a name is that of a tensor, or that of a file in a folder or in an index."""
    escape = "\x1b[2J\x9b\u202e"
    tensors = {f"x{escape}": np.zeros(3, np.float32)}
    folders = {"tensor": ["model"], "file": [escape], "index": [escape]}
    folders["files"] = [f"x{escape}", f"y{escape}"]
    for folder, files in folders.items():
        (tmp_path / folder).mkdir()
        for file in files:
            checkpoints.write_safetensors(tmp_path / folder / f"{file}.safetensors", tensors)
        if folder == "index":
            checkpoints.write_index(tmp_path / folder, {"x": f"{escape}.safetensors"})
        error = command.refused("inspect", tmp_path / folder)
        assert error.removesuffix("\n").isprintable()
        assert r"\x1b[2J\x9b\u202e" in error


@pytest.mark.parametrize("dtype", ["int8", "float64", "complex64", "float8_e4m3fn", "x"])
@pytest.mark.usefixtures("unchecked_types")
def test_dtypes(tmp_path: Path, dtype: Any) -> None:
    """Nothing is rounded to integers, nor to a narrower dtype than was asked for."""
    path = checkpoints.write_model(tmp_path, layers=1)
    params, tokens = models.load(path).params, jnp.zeros((1, 2), jnp.int32)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("load", lambda: models.load(path, dtype=dtype)),
        ("load_state", lambda: models.load_state(path, params, dtype=dtype)),
        ("rwkv7", lambda: rwkv7.initial_state(params, 1, dtype)),
        ("rwkv7", lambda: rwkv7.apply(params, tokens, dtype=dtype)),
        ("load", lambda: generation.load(path, rwkv7, params, dtype=dtype)),
    ]
    for what, call in calls:
        message = f"^{what}: dtype is '?{dtype}'?; accepted are float32, bfloat16, float16$"
        with pytest.raises(TypeError, match=message):
            call()


def test_float64_where_it_is_enabled(tmp_path: Path) -> None:
    path = checkpoints.write_model(tmp_path, layers=1)
    with jax.enable_x64(True):
        params = models.load(path, dtype="float64").params
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float64")}
    expected = checkpoints.rwkv7(layers=1)["emb.weight"]
    np.testing.assert_array_equal(params.emb.weight, expected)
