"""The safetensors format: the size of a header (8 bytes), the header (JSON), and the tensors."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from rwkv_jax.models._checkpoints.tensors import (
    BYTES,
    FLOATS,
    INTEGERS,
    TENSORS,
    Allowance,
    Mapped,
    Tensor,
    is_size,
    quoted,
    view,
)
from rwkv_jax.models._checkpoints.writing import Arrays, replacing

_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64"} | {
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {_NAMES[name]: dtype for name, dtype in (FLOATS | INTEGERS).items()}
_SIZE = 8


def read(data: Mapped, file: str, allowance: Allowance) -> dict[str, Tensor]:
    """The tensors of a mapped file.

    Raises:
      ValueError: the file does not follow the format, has a dtype without an equal in JAX, or has
        more than is allowed.
    """
    start = _SIZE + int.from_bytes(data[:_SIZE].tobytes(), "little")
    if len(data) < _SIZE or start > len(data):
        raise ValueError(
            f"{file}: neither a file of torch.save nor of safetensors: for the latter its header "
            f"would have {start - _SIZE} bytes, but the file has {len(data)}"
        )
    allowance.take(file, start - _SIZE, BYTES)
    header = _header(data[_SIZE:start].tobytes(), file)
    header.pop("__metadata__", None)
    allowance.take(file, len(header), TENSORS)
    found, places = {}, []
    for name, entry in header.items():
        dtype, shape, begin, end = _entry(entry, file, name)
        places.append((begin, end))
        if end > len(data) - start:
            raise ValueError(
                f"{file}: {quoted(name)} ends at byte {end} of the tensors; they have "
                f"{len(data) - start} bytes"
            )
        what = f"{file}: {quoted(name)}"
        found[name] = Tensor(view(what, data, start + begin, dtype, shape), file)
    # The format forbids gaps, so that each byte has one meaning.
    before = 0
    for begin, end in sorted(places):
        if begin != before:
            raise ValueError(
                f"{file}: a tensor begins at byte {begin}, and the one before it ends at {before}"
            )
        before = end
    if before != len(data) - start:
        raise ValueError(
            f"{file}: the tensors end at byte {before}, and the file has {len(data) - start} bytes "
            "for them"
        )
    return found


def _header(text: bytes, file: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            raise ValueError("a name occurs twice")
        return entries

    try:
        header = json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: the header is no valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file}: the header is no JSON object")
    return header


def _entry(entry: Any, file: str, name: str) -> tuple[np.dtype, tuple[int, ...], int, int]:
    what = f"{file}: {quoted(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{what} has other entries than dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        given = quoted(dtype) if isinstance(dtype, str) else f"a {type(dtype).__name__}"
        raise ValueError(f"{what} has the dtype {given}; accepted are {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(map(is_size, shape)):
        raise ValueError(f"{what} has a shape that is no list of up to 32 sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise ValueError(f"{what} has data_offsets that are no list of two offsets")
    begin, end = offsets
    size = math.prod(shape) * _DTYPES[dtype].itemsize
    if end - begin != size:
        raise ValueError(f"{what} has {end - begin} bytes; its dtype and shape need {size}")
    return _DTYPES[dtype], tuple(shape), begin, end


def write(path: Path, arrays: Arrays) -> None:
    """Write named arrays. One of them at a time is on the host.

    Raises:
      ValueError: they are more than `read` accepts.
    """
    Allowance().take(str(path), len(arrays), TENSORS)
    # Wide elements come first, so that each array is aligned to its elements.
    names = sorted(arrays, key=lambda name: -arrays[name].array.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        x = arrays[name]
        begin, end = end, end + x.nbytes
        header[name] = {
            "dtype": _NAMES[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_SIZE + len(text)) % 64)
    with replacing(path) as file:
        file.write(len(text).to_bytes(_SIZE, "little") + text)
        for name in names:
            file.write(arrays[name].content())
