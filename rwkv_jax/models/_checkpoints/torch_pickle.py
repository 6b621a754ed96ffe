"""The pickle within a file of torch.save, read without executing it, and written.

A pickle is a program for a stack machine that may call any function of Python. This reader has the
instructions that torch.save writes and knows three functions by name. It imports and calls nothing.
"""

import math
import pickle
import pickletools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from rwkv_jax.models._checkpoints.tensors import (
    FLOATS,
    INSTRUCTIONS,
    INTEGERS,
    TENSORS,
    Allowance,
    described,
    is_size,
    quoted,
)


class Storage(NamedTuple):
    """The contents of one or more tensors: `size` elements under the name `key`."""

    dtype: np.dtype
    key: str
    size: int


class View(NamedTuple):
    """A tensor: a view of a storage. Offset and strides are in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Function(NamedTuple):
    """The name of a function that the reader knows."""

    name: str


STORAGES = {
    "BFloat16Storage": FLOATS["bfloat16"],
    "HalfStorage": FLOATS["float16"],
    "FloatStorage": FLOATS["float32"],
    "DoubleStorage": FLOATS["float64"],
    "CharStorage": INTEGERS["int8"],
    "ShortStorage": INTEGERS["int16"],
    "IntStorage": INTEGERS["int32"],
    "LongStorage": INTEGERS["int64"],
    "ByteStorage": INTEGERS["uint8"],
    "BoolStorage": INTEGERS["bool"],
}
_DICTIONARY = _Function("collections.OrderedDict")
_TENSOR = _Function("torch._utils._rebuild_tensor_v2")
_PARAMETER = _Function("torch._utils._rebuild_parameter")
_GLOBALS: dict[str, Any] = {f.name: f for f in (_DICTIONARY, _TENSOR, _PARAMETER)} | {
    f"torch.{name}": dtype for name, dtype in STORAGES.items()
}
_CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"} | _TEXTS
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}

_PROTOCOL = 2

_CONTAINERS = ("state_dict", "model", "model_state_dict", "module")
"""The keys under which training programs keep a model beside an optimizer and what else they need
to go on: PyTorch Lightning, nanoGPT and many after it, tutorials of PyTorch, and DeepSpeed."""


def read(content: bytes, allowance: Allowance) -> dict[str, View]:
    """The tensors by name, each of which is within its storage. It is not known here which storages
    the file has. Of a dictionary with a model under one of `_CONTAINERS` they are those of the
    model.

    Raises:
      ValueError: the pickle has anything but a dictionary of tensors, or more than is allowed.
    """
    try:
        found = _Machine().run(content, allowance)
    except (IndexError, KeyError, OverflowError, RecursionError):
        raise ValueError("the pickle is damaged") from None
    if not isinstance(found, dict):
        raise ValueError(f"the pickle is {_kind(found)}; accepted is a dictionary of tensors")
    found = _model(found)
    allowance.take("the pickle", len(found), TENSORS)
    for name, x in found.items():
        if not isinstance(name, str):
            raise ValueError(f"the pickle has {_kind(name)} as a key; accepted are texts")
        if not isinstance(x, View):
            raise ValueError(
                f"the pickle has {_kind(x)} under {quoted(name)}; accepted are tensors"
            )
        _check_place(name, x)
    return found


def _model(found: dict[Any, Any]) -> dict[Any, Any]:
    """The dictionary of the model within one of a training run, or `found` itself."""
    inner = [key for key in _CONTAINERS if isinstance(found.get(key), dict)]
    if len(inner) > 1:
        both = " and ".join(map(repr, inner))
        raise ValueError(f"the pickle has models under {both}; accepted is one")
    return found[inner[0]] if inner else found


def write(views: Mapping[str, View]) -> bytes:
    """The pickle of a dictionary of tensors."""
    names = {dtype: name for name, dtype in STORAGES.items()}
    tensor, dictionary = (_refer(f.name) for f in (_TENSOR, _DICTIONARY))
    no_hooks = dictionary + pickle.EMPTY_TUPLE + pickle.REDUCE
    parts = [pickle.PROTO + bytes([_PROTOCOL]), pickle.EMPTY_DICT, pickle.MARK]
    for name, (storage, offset, shape, strides) in views.items():
        kind = _refer(f"torch.{names[storage.dtype]}")
        key, size = _literal(storage.key), _literal(storage.size)
        identity = _tuple(_literal("storage"), kind, key, _literal("cpu"), size)
        place = _literal(offset), _literal(shape), _literal(strides)
        call = _tuple(identity + pickle.BINPERSID, *place, pickle.NEWFALSE, no_hooks)
        parts += [_literal(name), tensor, call, pickle.REDUCE]
    return b"".join([*parts, pickle.SETITEMS, pickle.STOP])


def _literal(x: str | int | tuple[int, ...]) -> bytes:
    """The instructions that make a value: its pickle without the version and the end."""
    return pickle.dumps(x, _PROTOCOL)[2:-1]


def _refer(name: str) -> bytes:
    """The instruction that refers to a function or a class."""
    module, _, last = name.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{last}\n".encode()


def _tuple(*parts: bytes) -> bytes:
    return pickle.MARK + b"".join(parts) + pickle.TUPLE


class _Machine:
    """The stack machine. Values are texts, numbers, None, tuples, lists, dictionaries with texts
    or integers as keys, dtypes, functions that the reader knows, storages and views."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self, content: bytes, allowance: Allowance) -> Any:
        most = allowance.left[INSTRUCTIONS]
        for count, (name, argument) in enumerate(_instructions(content), 1):
            if name == "STOP" or count > most:
                allowance.take("the pickle", count, INSTRUCTIONS)
                return self.stack.pop()
            if name in _LITERALS:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                self.stack.append(tuple(self.popped(len(self.stack) - _TUPLES[name])))
            else:
                self.step(name, argument)
        raise ValueError("the pickle has no end")

    def step(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                self.marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(self.popped(self.marks.pop())))
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "APPEND" | "APPENDS":
                start = len(stack) - 1 if name == "APPEND" else self.marks.pop()
                self.extend(self.popped(start))
            case "SETITEM" | "SETITEMS":
                start = len(stack) - 2 if name == "SETITEM" else self.marks.pop()
                self.set_items(self.popped(start))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "GLOBAL":
                stack.append(_global(argument))
            case "STACK_GLOBAL":
                stack.append(_global(" ".join(map(_text, self.popped(len(stack) - 2)))))
            case "BINPERSID":
                stack.append(self.storage(stack.pop()))
            case "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_result(function, arguments))
            case "BUILD":
                # A state dictionary has an attribute with the versions of its modules.
                stack.pop()
                if not isinstance(stack[-1], dict):
                    raise ValueError(f"the pickle sets attributes of {_kind(stack[-1])}")
            case _:
                raise ValueError(
                    f"the pickle has the instruction {name}, which was not executed; torch.save "
                    "writes none unless told so"
                )

    def popped(self, start: int) -> list[Any]:
        """The values of the stack from `start` on, which leave the stack."""
        if start < 0:
            raise IndexError(start)
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def extend(self, values: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise ValueError(f"the pickle appends to {_kind(self.stack[-1])}")
        self.stack[-1].extend(values)

    def set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise ValueError(f"the pickle sets items of {_kind(target)}")
        if len(values) % 2:
            raise IndexError(len(values))
        for key, value in zip(values[::2], values[1::2], strict=True):
            # An optimizer numbers its parameters. To hash anything else could take long.
            if type(key) not in (str, int):
                raise ValueError(f"the pickle has {_kind(key)} as a key; accepted are texts")
            if key in target:
                raise ValueError(f"the pickle has {quoted(str(key))} twice")
            target[key] = value

    def storage(self, identity: Any) -> Storage:
        if not isinstance(identity, tuple) or len(identity) != 5:
            raise ValueError("the pickle refers to an object outside of it that is no storage")
        kind, dtype, key, _, size = identity
        if (
            not (isinstance(kind, str) and kind == "storage")
            or not isinstance(dtype, np.dtype)
            or not isinstance(key, str)
            or not is_size(size)
        ):
            raise ValueError("the pickle refers to an object outside of it that is no storage")
        return Storage(dtype, key, size)


def _instructions(content: bytes) -> Iterator[tuple[str, Any]]:
    """The names and arguments of the instructions of a pickle."""
    try:
        for instruction, argument, _ in pickletools.genops(content):
            yield instruction.name, argument
    except ValueError as error:
        # The module quotes the content, which may be long.
        raise ValueError(f"the pickle is damaged: {error!s:.100}") from None


def _global(argument: str) -> Any:
    name = ".".join(argument.split(" ", 1))
    if name not in _GLOBALS:
        raise ValueError(
            f"the pickle refers to {quoted(name)}, which was not executed; accepted are tensors "
            "only, as torch.save writes of a state_dict"
        )
    return _GLOBALS[name]


def _text(x: Any) -> str:
    if not isinstance(x, str):
        raise ValueError(f"the pickle has {_kind(x)} in place of the name of a function")
    return x


def _result(function: Any, arguments: Any) -> Any:
    """What a function returns that the reader knows."""
    if not isinstance(function, _Function) or not isinstance(arguments, tuple):
        raise ValueError(f"the pickle calls {_kind(function)}, which was not executed")
    if function == _DICTIONARY and not arguments:
        return {}
    if function == _TENSOR and len(arguments) in (6, 7):
        return _tensor(*arguments[:4])
    if function == _PARAMETER and len(arguments) == 3 and isinstance(arguments[0], View):
        return arguments[0]
    raise ValueError(f"the pickle calls {function.name} with other arguments than torch.save")


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> View:
    if (
        not isinstance(storage, Storage)
        or not is_size(offset)
        or not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or len(shape) > 32
        or len(strides) != len(shape)
        or not all(map(is_size, (*shape, *strides)))
    ):
        raise ValueError("the pickle has a tensor without a storage, an offset, sizes and strides")
    return View(storage, offset, shape, strides)


def _check_place(name: str, x: View) -> None:
    """Raise an error if a tensor is not within its storage."""
    storage, offset, shape, strides = x
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    what = (
        f"{quoted(name)} is {described(shape)}, at offset {offset} with strides "
        f"{described(strides)}, and"
    )
    if x.size and last >= storage.size:
        raise ValueError(f"{what} leaves its storage, which has {storage.size} elements")
    if x.size > storage.size:
        raise ValueError(f"{what} has more elements than its storage, which has {storage.size}")


def _kind(x: Any) -> str:
    """What a value is, for an error message."""
    if isinstance(x, View | Storage):
        return f"a {type(x).__name__.lower()}"
    return x.name if isinstance(x, _Function) else f"a {type(x).__name__}"
