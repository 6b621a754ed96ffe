"""`rwkv-jax inspect`: what a checkpoint holds, and what it needs of memory."""

import argparse
import dataclasses
import os
from collections.abc import Iterable
from typing import Any

from rwkv_jax._commands.arguments import add_dtype, add_model, positive
from rwkv_jax._commands.output import in_bytes, table

HELP = "Show the generation, sizes and memory of a model. Only names and shapes are read."
EXAMPLES = (
    "inspect model.pth",
    "inspect folder-of-hugging-face --batch 64 --dtype bfloat16",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--batch", type=positive, default=1, help="rows whose states are counted (default: 1)"
    )
    add_dtype(parser, "dtype of weights and activations in memory (default: that of the file)")


def run(arguments: argparse.Namespace) -> int:
    print(table(_rows(arguments.model, arguments.batch, arguments.dtype)))
    return 0


def _rows(path: str, batch: int, dtype: str | None) -> list[tuple[str, str]]:
    """What is known about a checkpoint: names and values."""
    import jax

    from rwkv_jax import models, tokenizers
    from rwkv_jax.models import _parameters
    from rwkv_jax.models._checkpoints.loading import loaded_dtype

    found = models.inspect(path)
    arrays = _parameters.names(found.params)
    count = sum(x.size for name, x in arrays.items() if not _is_scale(name))
    loaded = [loaded_dtype(name, x.dtype, dtype) for name, x in arrays.items()]
    weights = sum(x.size * used.itemsize for x, used in zip(arrays.values(), loaded, strict=True))
    # Activations have one dtype: the widest of the parameters, where these differ.
    dtypes = (used for name, used in zip(arrays, loaded, strict=True) if not _is_scale(name))
    activations = max(dtypes, key=lambda x: x.itemsize)
    state = jax.eval_shape(
        lambda params: found.module.initial_state(params, batch, activations), found.params
    )
    states = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    try:
        tokenizer = tokenizers.for_vocabulary(found.config.vocab_size, checkpoint=path)
    except ValueError:
        tokenizer = "not known from the size of the vocabulary"
    rows = "1 row" if batch == 1 else f"{batch} rows"
    return [
        ("generation", found.generation),
        *((name.replace("_", " "), str(x)) for name, x in dataclasses.asdict(found.config).items()),
        *((name, _different(x)) for name, x in _own_sizes(path, arrays).items()),
        ("parameters", f"{count:,}"),
        ("dtype", _different(x.dtype for x in arrays.values())),
        ("files", in_bytes(sum(map(os.path.getsize, found.files)))),
        ("weights", f"{in_bytes(weights)} in {_different(loaded)}"),
        ("states", f"{in_bytes(states)} for {rows}, activations in {activations}"),
        ("tokenizer", tokenizer),
    ]


def _is_scale(name: str) -> bool:
    """Whether an array belongs to a quantised weight, and is no parameter of its own."""
    return name.endswith(".scale")


def _different(values: Iterable[Any]) -> str:
    """The different ones of some values, in their order."""
    return ", ".join(map(str, dict.fromkeys(values)))


def _own_sizes(path: str, arrays: dict[str, Any]) -> dict[str, list[int]]:
    """The sizes that no configuration tells, such as ranks, by what they are the sizes of. A size
    may differ from block to block."""
    from rwkv_jax.models._checkpoints.layouts import layout_of

    layout = layout_of(path, arrays)
    found: dict[str, list[int]] = {}
    for name, x in arrays.items():
        for end, axes in layout.own.items():
            if name.endswith(end):
                for axis, size in zip(axes, x.shape, strict=True):
                    if axis is not None:
                        found.setdefault(axis, []).append(size)
    return found
