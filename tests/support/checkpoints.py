"""Checkpoints as other programs write them, of random numbers."""

import collections
import io
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

Tensors: TypeAlias = dict[str, np.ndarray]
Shapes: TypeAlias = dict[str, tuple[int, ...]]

INDEX = "model.safetensors.index.json"
RANKS = {"w": 7, "a": 5, "v": 3, "g": 9}
MIX_RANK, DECAY_RANK = 3, 7
UNUSED = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
VECTORS = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")
TORCH = {"bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "int64": "Long"}
SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "int8": "I8"}


def rwkv7(**options: Any) -> Tensors:
    """The tensors of RWKV-7. In the first block `v0` to `v2` are unused."""
    return official("RWKV-7", **options)


def official(
    version: str,
    *,
    layers: int = 2,
    heads: int = 3,
    head_size: int = 8,
    vocabulary: int = 37,
    dtype: str = "float32",
) -> Tensors:
    """The tensors of RWKV-LM's training code for a version in `MIXINGS`."""
    rng = np.random.default_rng(0)
    width = heads * head_size
    att, ffn = MIXINGS[version](heads, head_size)

    def norm(name: str) -> Shapes:
        return {f"{name}.weight": (width,), f"{name}.bias": (width,)}

    shapes: Shapes = {"emb.weight": (vocabulary, width)}
    for i in range(layers):
        for name in ("ln1", "ln2") if i else ("ln0", "ln1", "ln2"):
            shapes |= norm(f"blocks.{i}.{name}")
        shapes |= {f"blocks.{i}.att.{name}": shape for name, shape in att.items()}
        if version != "RWKV-4":
            shapes |= norm(f"blocks.{i}.att.ln_x")
        shapes |= {f"blocks.{i}.ffn.{name}": shape for name, shape in ffn.items()}
    shapes |= norm("ln_out") | {"head.weight": (vocabulary, width)}
    return {
        name: (0.3 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


def vectors(names: Iterable[str], width: int) -> Shapes:
    return dict.fromkeys(names, (1, 1, width))


def weights(width: int, *more: str) -> Shapes:
    names = ("receptance", "key", "value", "output", *more)
    return {f"{name}.weight": (width, width) for name in names}


def gated(hidden: int, width: int, mix: str) -> Shapes:
    """The channel mixing with a gate."""
    linear = {"key": (hidden, width), "receptance": (width, width), "value": (width, hidden)}
    mixes = vectors((f"{mix}_k", f"{mix}_r"), width)
    return mixes | {f"{name}.weight": shape for name, shape in linear.items()}


def mixings_of_rwkv7(heads: int, head_size: int) -> tuple[Shapes, Shapes]:
    width, hidden = heads * head_size, 4 * heads * head_size
    att = vectors(VECTORS, width)
    att |= {f"{name}1": (width, rank) for name, rank in RANKS.items()}
    att |= {f"{name}2": (rank, width) for name, rank in RANKS.items()}
    att |= {"r_k": (heads, head_size)} | weights(width)
    linear = {"key.weight": (hidden, width), "value.weight": (width, hidden)}
    return att, vectors(["x_k"], width) | linear


def mixings_of_rwkv6(heads: int, head_size: int) -> tuple[Shapes, Shapes]:
    width = heads * head_size
    att = vectors((f"time_maa_{x}" for x in "xwkvrg"), width)
    att |= {"time_maa_w1": (width, 5 * MIX_RANK), "time_maa_w2": (5, MIX_RANK, width)}
    att |= {"time_decay": (1, 1, width), "time_faaaa": (heads, head_size)}
    att |= {"time_decay_w1": (width, DECAY_RANK), "time_decay_w2": (DECAY_RANK, width)}
    return att | weights(width, "gate"), gated(3 * width + 1, width, "time_maa")


def mixings_of_rwkv5(
    heads: int, head_size: int, *, of_head: bool = False, gate: bool = True, bonus: str
) -> tuple[Shapes, Shapes]:
    width = heads * head_size
    of_heads = (heads,) if of_head else (heads, head_size)
    att = vectors((f"time_mix_{x}" for x in ("kvrg" if gate else "kvr")), width)
    att |= {"time_decay": of_heads, bonus: of_heads} | weights(width, *["gate"] * gate)
    return att, gated(3 * width + 1, width, "time_mix")


def mixings_of_rwkv4(heads: int, head_size: int) -> tuple[Shapes, Shapes]:
    width = heads * head_size
    att = vectors((f"time_mix_{x}" for x in "kvr"), width)
    att |= {"time_decay": (width,), "time_first": (width,)} | weights(width)
    return att, gated(4 * width + 3, width, "time_mix")


MIXINGS: dict[str, Callable[[int, int], tuple[Shapes, Shapes]]] = {
    "RWKV-4": mixings_of_rwkv4,
    "RWKV-5.0": partial(mixings_of_rwkv5, of_head=True, gate=False, bonus="time_first"),
    "RWKV-5.1": partial(mixings_of_rwkv5, of_head=True, bonus="time_faaaa"),
    "RWKV-5.2": partial(mixings_of_rwkv5, bonus="time_faaaa"),
    "RWKV-6": mixings_of_rwkv6,
    "RWKV-7": mixings_of_rwkv7,
}
"""The names and shapes of time mixing and channel mixing in a block, by version."""


def hugging_face(tensors: Tensors) -> Tensors:
    """The tensors of RWKV-4 to 6 as the models of Hugging Face have them."""
    words = {"emb": "embeddings", "att": "attention", "ffn": "feed_forward", "ln0": "pre_ln"}
    mixes = {"k": "key", "v": "value", "r": "receptance", "g": "gate"}
    words |= {f"time_mix_{letter}": f"time_mix_{word}" for letter, word in mixes.items()}
    found = {}
    for name, x in tensors.items():
        there = ".".join(words.get(word, word) for word in name.split("."))
        found[name if name == "head.weight" else f"rwkv.{there}"] = x
    return found


def fla(tensors: Tensors) -> Tensors:
    """The tensors as flash-linear-attention has them."""
    words = {"att": "attn", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    maps = {"receptance": "r_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    found = {
        "model.embeddings.weight": tensors["emb.weight"],
        "model.norm.weight": tensors["ln_out.weight"],
        "model.norm.bias": tensors["ln_out.bias"],
        "lm_head.weight": tensors["head.weight"],
    }
    for name, x in tensors.items():
        if not name.startswith("blocks.") or name in UNUSED:
            continue
        _, layer, part, first, *rest = name.split(".")
        if part == "att" and first in ("k_k", "k_a"):
            x = x.reshape(-1)
        elif part == "att" and len(first) == 2 and first[0] in RANKS:
            lora = {"0": "2.bias", "1": "0.weight", "2": "2.weight"}[first[1]]
            first, x = f"{first[0]}_lora.lora.{lora}", x.reshape(-1) if first[1] == "0" else x.T
        elif part == "att":
            first = (maps | {"ln_x": "g_norm"}).get(first, first)
        elif part == "ffn" and first == "x_k":
            x = x.reshape(-1)
        found[".".join(["model.layers", layer, words.get(part, part), first, *rest])] = x
    return found


class Storage(NamedTuple):
    """What a tensor of PyTorch is a view of."""

    key: str
    x: np.ndarray


class Global(str):
    """The name of a function or class of PyTorch, which is not needed."""

    def __call__(self) -> None:
        """What a pickler takes for a function can be called."""


class Call:
    """A value that a pickle makes by calling a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


KINDS = {dtype: Global(f"torch {name}Storage") for dtype, name in TORCH.items()}
REBUILD = Global("torch._utils _rebuild_tensor_v2")
REBUILD_PARAMETER = Global("torch._utils _rebuild_parameter")


def tensor(
    storage: Storage, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0
) -> Call:
    return Call(REBUILD, storage, offset, shape, strides, False, collections.OrderedDict())


def parameter(*arguments: Any) -> Call:
    return Call(REBUILD_PARAMETER, tensor(*arguments), True, collections.OrderedDict())


class Pickler(pickle._Pickler):
    """Writes what torch.save writes."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=2)
        self.storages: dict[str, bytes] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        self.storages[obj.key] = obj.x.tobytes()
        return "storage", KINDS[str(obj.x.dtype)], obj.key, "cpu", obj.x.size

    def save_torch_global(self: Any, obj: Global) -> None:
        self.write(pickle.GLOBAL + obj.replace(" ", "\n").encode() + b"\n")
        self.memoize(obj)

    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch, Global: save_torch_global}


def torch_pickle(value: Any) -> tuple[bytes, dict[str, bytes]]:
    """The pickle that torch.save makes of a value, and the contents of its storages."""
    pickler = Pickler(file := io.BytesIO())
    pickler.dump(value)
    return file.getvalue(), pickler.storages


def state_dict(
    tensors: Mapping[str, np.ndarray], kind: Callable[..., Call] = tensor
) -> collections.OrderedDict[str, Call]:
    """The `state_dict` of a module of PyTorch, with the attribute that it has."""

    class Attributed(collections.OrderedDict):
        def __reduce__(self) -> Any:
            state = {"_metadata": collections.OrderedDict({"": {"version": 1}})}
            return collections.OrderedDict, (), state, None, iter(self.items())

    found = Attributed()
    for i, (name, x) in enumerate(tensors.items()):
        strides = tuple(math.prod(x.shape[axis + 1 :]) for axis in range(x.ndim))
        found[name] = kind(Storage(str(i), x), x.shape, strides)
    return found


def archive(
    pickled: bytes,
    storages: Mapping[str, bytes] = {},
    *,
    compression: int = zipfile.ZIP_STORED,
    byteorder: bytes = b"little",
) -> bytes:
    """A zip archive as torch.save makes it: no compression, and contents aligned to 64 bytes."""
    members = {"data.pkl": pickled, "byteorder": byteorder}
    members |= {f"data/{key}": x for key, x in storages.items()} | {"version": b"3\n"}
    with zipfile.ZipFile(file := io.BytesIO(), "w") as opened:
        for name, content in members.items():
            info = zipfile.ZipInfo(f"model/{name}")
            info.compress_type = compression
            size = -(file.tell() + 30 + len(info.filename) + 4) % 64
            info.extra = b"FB" + size.to_bytes(2, "little") + b"Z" * size
            opened.writestr(info, content)
            info.extra = b""  # the directory at the end has none
    return file.getvalue()


def torch_file(value: Any, **options: Any) -> bytes:
    """What torch.save writes."""
    return archive(*torch_pickle(value), **options)


def write_pth(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    path.write_bytes(torch_file(state_dict(tensors)))
    return path


def safetensors(header: Any, contents: bytes = b"", size: int | None = None) -> bytes:
    """A header, whose size may be wrong, and the contents of tensors."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + contents


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    header, contents = {}, b""
    for name, x in tensors.items():
        begin, contents = len(contents), contents + x.tobytes()
        header[name] = {
            "dtype": SAFETENSORS[str(x.dtype)],
            "shape": x.shape,
            "data_offsets": (begin, len(contents)),
        }
    path.write_bytes(safetensors(header, contents))
    return path


def write_model(folder: Path, version: str = "RWKV-7", **options: Any) -> Path:
    """A model of random numbers in model.safetensors."""
    return write_safetensors(folder / "model.safetensors", official(version, **options))


def write_index(folder: Path, files: Any) -> Path:
    """The index that says in which file each tensor is."""
    path = folder / INDEX
    path.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": files}))
    return path
