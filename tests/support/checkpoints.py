"""Checkpoints as other programs write them, of random numbers."""

import collections
import io
import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

Tensors: TypeAlias = dict[str, np.ndarray]

INDEX = "model.safetensors.index.json"
RANKS = {"w": 7, "a": 5, "v": 3, "g": 9}
UNUSED = ("blocks.0.att.v0", "blocks.0.att.v1", "blocks.0.att.v2")
SAFETENSORS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "int64": "I64", "int8": "I8"}

LINEAR = "receptance.weight key.weight value.weight output.weight"
WITH_GATE = f"{LINEAR} gate.weight"
KVR = "time_mix_k time_mix_v time_mix_r"
KVRG = f"{KVR} time_mix_g"
GATED = {"FC": "key.weight", "CC": "receptance.weight", "CF": "value.weight"}
GATED |= {"11C": "time_mix_k time_mix_r"}
MIXINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "RWKV-4": ({"11C": KVR, "C": "time_decay time_first", "CC": LINEAR}, GATED),
    "RWKV-5.0": ({"11C": KVR, "H": "time_decay time_first", "CC": LINEAR}, GATED),
    "RWKV-5.1": ({"11C": KVRG, "H": "time_decay time_faaaa", "CC": WITH_GATE}, GATED),
    "RWKV-5.2": ({"11C": KVRG, "HK": "time_decay time_faaaa", "CC": WITH_GATE}, GATED),
    "RWKV-6": (
        {
            "11C": " ".join(f"time_maa_{x}" for x in "xwkvrg") + " time_decay",
            "CN": "time_maa_w1",
            "5MC": "time_maa_w2",
            "CD": "time_decay_w1",
            "DC": "time_decay_w2",
            "HK": "time_faaaa",
            "CC": WITH_GATE,
        },
        GATED | {"11C": "time_maa_k time_maa_r"},
    ),
    "RWKV-7": (
        {"11C": "x_r x_w x_k x_v x_a x_g w0 a0 v0 k_k k_a", "HK": "r_k", "CC": LINEAR}
        | {f"C{x}": f"{x}1" for x in RANKS}
        | {f"{x}C": f"{x}2" for x in RANKS},
        {"11C": "x_k", "FC": "key.weight", "CF": "value.weight"},
    ),
}
"""The tensors of time mixing and channel mixing in a block by their axes, for each version. F is
the width of channel mixing, and M, N, D and small letters are ranks."""


def rwkv7(**options: Any) -> Tensors:
    """The tensors of RWKV-7. In the first block `v0` to `v2` are unused."""
    return official("RWKV-7", **options)


def rwkv7a(size: int = 4, **options: Any) -> Tensors:
    """The tensors of RWKV-7a, which has tables of matrices [size, size] for DeepEmbed."""
    tensors = rwkv7(**options)
    vocabulary, width = tensors["emb.weight"].shape
    hidden, square = 4 * width, size * size
    shapes = {"s0": (1, 1, hidden), "s1": (width, size), "s2": (size, hidden)}
    shapes |= {"s_emb.weight": (vocabulary, square), "s_emb_x.weight": (square, width)}
    rng = np.random.default_rng(7)
    for layer in range(sum(name.endswith(".att.r_k") for name in tensors)):
        for name, shape in shapes.items():
            x = 0.3 * rng.standard_normal(shape)
            tensors[f"blocks.{layer}.ffn.{name}"] = x.astype(tensors["emb.weight"].dtype)
    return tensors


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
    hidden = {"RWKV-4": 4 * width + 3, "RWKV-7": 4 * width}.get(version, 3 * width + 1)
    sizes = {"1": 1, "5": 5, "C": width, "F": hidden, "H": heads, "K": head_size}
    sizes |= {"M": 3, "N": 15, "D": 7, **RANKS}
    names = {"emb.weight head.weight": (vocabulary, width), "ln_out.weight ln_out.bias": (width,)}
    shapes = {name: shape for several, shape in names.items() for name in several.split()}
    for i in range(layers):
        norms = ["ln1", "ln2", *["ln0"] * (i == 0), *["att.ln_x"] * (version != "RWKV-4")]
        shapes |= {f"blocks.{i}.{x}.{end}": (width,) for x in norms for end in ("weight", "bias")}
        for part, mixing in zip(("att", "ffn"), MIXINGS[version], strict=True):
            for axes, several in mixing.items():
                shape = tuple(sizes[axis] for axis in axes)
                shapes |= {f"blocks.{i}.{part}.{name}": shape for name in several.split()}
    return {
        name: (0.3 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
        for name, shape in shapes.items()
    }


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
    words = {"emb": "model.embeddings", "ln_out": "model.norm", "head": "lm_head"}
    words |= {"blocks": "model.layers", "ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
    words |= {f"att.{x}": f"att.{x[0]}_proj" for x in ("receptance", "key", "value", "output")}
    words |= {"att": "attn", "ln_x": "g_norm", "([wavg])0": r"\1_lora.lora.2.bias"}
    words |= {"([wavg])1": r"\1_lora.lora.0.weight", "([wavg])2": r"\1_lora.lora.2.weight"}
    found = {}
    for name, x in tensors.items():
        there = name
        for word, other in words.items():
            there = re.sub(rf"\b{word}(?=\.|$)", other, there)
        if re.search(r"\.[wavg][12]$", name):
            x = x.T
        elif re.search(r"\.([wav]0|k_k|k_a|ffn\.x_k)$", name):
            x = x.reshape(-1)
        if name not in UNUSED:
            found[there] = x
    return found


def transformers(tensors: Tensors) -> Tensors:
    """The tensors of RWKV-7 as `RwkvForCausalLM` of transformers-rwkv has them."""
    words = {"emb": "model.embed_tokens", "ln_out": "model.norm", "head": "lm_head"}
    words |= {"blocks.0.ln0": "model.embedding_norm", "blocks": "model.layers"}
    words |= {"ln1": "input_layernorm", "ln2": "post_attention_layernorm", "ffn": "mlp"}
    words |= {f"att.{x}": f"att.{x[0]}_proj" for x in ("receptance", "key", "value", "output")}
    words |= {"att": "linear_attn", "ln_x": "g_norm"}
    found = {}
    for name, x in tensors.items():
        there = name
        for word, other in words.items():
            there = re.sub(rf"\b{word}(?=\.|$)", other, there)
        if name not in UNUSED:
            found[there] = x.reshape(-1) if x.shape[:2] == (1, 1) else x
    return found


def prefixed(prefix: str, tensors: Tensors, *without: str) -> Tensors:
    """The tensors with a prefix, but for some."""
    return {name if name in without else prefix + name: x for name, x in tensors.items()}


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


TORCH = {"bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "int64": "Long"}
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

    def __init__(self, file: io.BytesIO, protocol: int = 2):
        super().__init__(file, protocol=protocol)
        self.storages: dict[str, bytes] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Storage):
            return None
        self.storages[obj.key] = obj.x.tobytes()
        return "storage", KINDS[str(obj.x.dtype)], obj.key, "cpu", obj.x.size

    def save_torch_global(self: Any, obj: Global) -> None:
        if self.proto < 4:
            self.write(pickle.GLOBAL + obj.replace(" ", "\n").encode() + b"\n")
        else:
            for text in obj.split():
                self.save(text)
            self.write(pickle.STACK_GLOBAL)
        self.memoize(obj)

    dispatch: ClassVar[Any] = {**pickle._Pickler.dispatch, Global: save_torch_global}


def torch_pickle(value: Any, protocol: int = 2) -> tuple[bytes, dict[str, bytes]]:
    """The pickle that torch.save makes of a value, and the contents of its storages."""
    pickler = Pickler(file := io.BytesIO(), protocol)
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


def torch_file(value: Any, *, protocol: int = 2, **options: Any) -> bytes:
    """What torch.save writes."""
    return archive(*torch_pickle(value, protocol), **options)


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
