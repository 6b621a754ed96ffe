"""Print the tables of what is supported, or write them to docs/pages/operators.md and devices.md.

    python scripts/support_matrix.py           # print them
    python scripts/support_matrix.py --write   # replace them in the pages

The package itself is asked: `rwkv_jax.implementations` says what runs on a platform, the native
planner says which CUDA kernels run on a GPU, and `rwkv_jax.sharding.shard` accepts or refuses mesh
axes. Nothing runs on a device. Where the CUDA kernels are not installed, their sources are compiled
for the emulation of the tests, which takes g++ and about a minute.
"""

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import rwkv_jax
from rwkv_jax.sharding import shard
from support import emulation, internals
from support.cases import GPUS

ROOT = Path(__file__).resolve().parents[1]
OPERATORS = ("wkv7", "wkv6", "wkv5", "wkv4")
HEADS = OPERATORS[:3]
DECAYS = {op: ("sigmoid", "log", "exp") if op == "wkv7" else ("log", "exp") for op in OPERATORS}
DTYPES = ("float32", "bfloat16", "float16")
PACKINGS = ("one sequence", "`segment_ids`", "`cu_seqlens`")
STEP = "one token, in a step"
COLUMNS = {
    "8.0": "8.0: A100",
    "8.9": "8.6, 8.9, 12.0",
    "12.0": "8.6, 8.9, 12.0",
    "9.0": "9.0: H100",
    "10.0": "10.0: B200",
}
"""The column of each GPU of tests/support/cases.py, by compute capability."""

BY_TOKEN = "token by token"
WORDS = {"matrix units": "matrix", BY_TOKEN: "**token**", "": "-"}
"""How the table calls the kernels of a plan, or that there are none."""

POWERS = {str(n): (n, n) for n in (16, 32, 64, 128)}
MULTIPLES = {
    "other multiples of 8 from 16 to 64": (24, 48),
    "other multiples of 8 from 16 to 128": (96, 24),
}
"""K and V of head sizes."""

Box = dict[str, tuple[str, ...]]
"""Calls: each combination of one value of each axis."""


class Row(NamedTuple):
    calls: Box
    cells: tuple[str, ...]


def implementations_table() -> str:
    """For each operator, dtype and head size, the implementations that can run a call and its
    gradient on each platform, besides "reference", which runs everywhere."""
    platforms = {"CPU": "cpu", "CUDA GPU": "cuda", "TPU": "tpu", "others": "rocm"}
    sizes = POWERS | {"256": (256, 256), "K ≠ V, of 16, 32, 64, 128": (64, 32)}
    sizes |= {"other multiples of 8 from 16 to 128": (96, 24), "any other": (20, 20)}
    axes = {"operator": OPERATORS, "head size": tuple(sizes), "inputs": DTYPES, "tokens": PACKINGS}
    rows = []
    with pytest.MonkeyPatch.context() as patch:
        internals.pretend(patch, "cpu", None)
        internals.pretend(patch, "cuda", None)
        # As if JAX had both compilers of Pallas kernels.
        lowering = internals.pallas_lowering()
        why_not = lowering.why_not
        patch.setattr(lowering, "why_not", lambda x: None if x in ("cuda", "tpu") else why_not(x))
        for call in _calls(axes):
            op, tokens = call["operator"], call["tokens"]
            operands = _operands(op, tokens, call["inputs"], *sizes[call["head size"]])
            able = [
                rwkv_jax.implementations(op, *operands, platform=x, **_packing(tokens))
                for x in platforms.values()
            ]
            assert all(x["reference"].available for x in able), call
            cells = (", ".join(_able(x)) for x in able)
            rows.append(Row(_box(call), tuple(cells)))
    return _table(axes, tuple(platforms), _merged(rows, axes))


def kernels_table(planner: Any) -> str:
    """The calls for which some GPU has kernels on matrix units, and the kernels on each GPU. All
    other calls of these operators go token by token, among them all that have at most 15 tokens, if
    K = V is a power of two; or else there are no such kernels.

    planner: the native module of CUDA, or its emulation.
    """
    axes = {
        "operator": HEADS,
        "inputs": (*DTYPES, "highest"),
        "head size": (*POWERS, *MULTIPLES),
        "`decay`": DECAYS["wkv7"],
        "tokens": PACKINGS,
        "pass": ("forward", "backward"),
    }
    columns = tuple(dict.fromkeys(COLUMNS.values()))
    rows = []
    for call in _calls(axes):
        if call["`decay`"] not in DECAYS[call["operator"]]:
            continue
        kernels: dict[str, str] = {}
        for gpu, (multiprocessors, shared_memory) in GPUS.items():
            device = {"multiprocessors": multiprocessors, "shared_memory": shared_memory}
            target = call["operator"], {"forward": "fwd", "backward": "bwd"}[call["pass"]]
            kernel = planner.plan(*target, **device, **_problem(call, 1000))["kernel"]
            assert planner.plan(*target, **device, **_problem(call, 15))["kernel"] == BY_TOKEN
            if kernel == BY_TOKEN and call["head size"] in MULTIPLES:
                kernel = ""
            assert kernels.setdefault(COLUMNS[gpu], kernel) == kernel, (call, gpu)
        if "matrix units" in kernels.values():
            rows.append(Row(_box(call), tuple(WORDS[kernels[x]] for x in columns)))
    return _table(axes, columns, _merged(rows, axes))


def axes_table() -> str:
    """The axes along which `shard` distributes each operator."""
    axes = {"operator": OPERATORS, "tokens": (*PACKINGS, STEP)}
    mesh = AbstractMesh((2,), ("x",))
    rows = []
    for call in _calls(axes):
        op = call["operator"] + ("_step" if call["tokens"] == STEP else "")
        operands, packing = _operands(op, call["tokens"], "float32"), _packing(call["tokens"])
        cells = []
        for axis in ("batch", "heads", "sequence"):
            try:
                function = shard(getattr(rwkv_jax, op), mesh, **cast("Any", {axis: "x"}))
                jax.eval_shape(lambda *x, f=function, p=packing: f(*x, decay="exp", **p), *operands)
                cells.append("yes")
            except ValueError:
                cells.append("-")
        rows.append(Row(_box(call), tuple(cells)))
    return _table(axes, ("batch", "heads or channels", "sequence"), _merged(rows, axes))


def _able(implementations: Mapping[str, rwkv_jax.Availability]) -> list[str]:
    """The implementations that can run, without the one that runs everywhere."""
    return [name for name, x in implementations.items() if x.available and name != "reference"]


def _calls(axes: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def _box(call: Mapping[str, str]) -> Box:
    return {axis: (value,) for axis, value in call.items()}


def _operands(op: str, tokens: str, dtype: str, keys: int = 64, values: int = 64) -> list[Any]:
    """The inputs of a call, in shapes, and the state of a step."""
    rows = 1 if tokens == "`cu_seqlens`" else 2
    sizes = {"B": rows, "T": 64, "H": 2, "C": 2, "K": keys, "V": values}
    inputs, state = [], []
    for name, letters in internals.axes_of_arguments(op).items():
        shape = [sizes[x] for x in letters]
        if name in internals.signature(op).inputs:
            inputs.append(jax.ShapeDtypeStruct(shape, dtype))
        elif tokens == STEP:
            state.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    return [*inputs, *([rwkv_jax.Wkv4State(*state)] if len(state) > 1 else state)]


def _packing(tokens: str) -> dict[str, Any]:
    return {
        "`segment_ids`": {"segment_ids": jnp.ones((2, 64), jnp.int32)},
        "`cu_seqlens`": {"cu_seqlens": jnp.array([0, 30, 64], jnp.int32)},
    }.get(tokens, {})


def _problem(call: Mapping[str, str], tokens: int) -> dict[str, int]:
    """A call of so many tokens in the words of the planner."""
    packing = PACKINGS.index(call["tokens"])
    keys, values = (POWERS | MULTIPLES)[call["head size"]]
    return {
        "decay": internals.kernels.DECAYS[call["`decay`"]],
        "exact": int(call["inputs"] == "highest"),
        "packing": packing,
        "dtype": internals.kernels.DTYPES[call["inputs"].replace("highest", "bfloat16")],
        "rows": 1,
        "tokens": tokens,
        "sequences": 3 if packing == 2 else 1,
        "heads": 2,
        "head_size": keys,
        "value_size": values,
        "saves": 1,
    }


def _merged(rows: list[Row], axes: Mapping[str, Sequence[str]]) -> list[Row]:
    """The rows with equal cells joined where they differ on one axis alone, the last axis first."""
    for axis in reversed([*axes]):
        groups: dict[Any, list[Row]] = {}
        for row in rows:
            rest = tuple(values for name, values in row.calls.items() if name != axis)
            groups.setdefault((rest, row.cells), []).append(row)
        rows = [
            group[0]._replace(
                calls=group[0].calls | {axis: tuple(v for row in group for v in row.calls[axis])}
            )
            for group in groups.values()
        ]
    return rows


def _table(axes: Mapping[str, Sequence[str]], columns: Sequence[str], rows: list[Row]) -> str:
    """In Markdown. An axis on which all rows have the same values is in a line below it, and one
    with all values is left out."""
    values = {name: {_words(name, row.calls[name], axes[name]) for row in rows} for name in axes}
    shown = [name for name in axes if len(values[name]) > 1]
    lines = [[*shown, *columns], ["---"] * (len(shown) + len(columns))]
    for row in rows:
        words = [_words(name, row.calls[name], axes[name]) for name in shown]
        lines.append([*words, *row.cells])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    common = {name: min(x) for name, x in values.items() if len(x) == 1}
    notes = [f"{name} {words}" for name, words in common.items() if words != "all"]
    return text + "".join(f"\nAll rows: {x}.\n" for x in notes)


def _words(axis: str, values: Sequence[str], known: Sequence[str]) -> str:
    missing = [x for x in known if x not in values]
    if not missing:
        return "all"
    if axis == "tokens" and len(missing) == 1 < len(values):
        return f"all but {missing[0]}"
    return ", ".join(f"`{x}`" if axis in ("operator", "`decay`") else x for x in values)


def planner() -> Any:
    """The native module of CUDA, or else its emulation."""
    if internals.missing("cuda") is None:
        return internals.native_module("cuda")
    with tempfile.TemporaryDirectory() as folder:
        return emulation.load(Path(folder))


def with_table(page: str, name: str, table: str) -> str:
    """A page with the table between two comments replaced."""
    start, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.split(start)
    return f"{before}{start}\n{table}\n{end}{rest.split(end)[1]}"


PAGES = {"implementations": "operators.md", "CUDA kernels": "operators.md", "axes": "devices.md"}
"""For each table the page that has it."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="replace the tables in the pages")
    args = parser.parse_args(argv)
    tables = {
        "implementations": implementations_table(),
        "axes": axes_table(),
        "CUDA kernels": kernels_table(planner()),
    }
    for name, table in tables.items():
        page = ROOT / "docs" / "pages" / PAGES[name]
        if args.write:
            page.write_text(with_table(page.read_text(), name, table))
        else:
            print(f"{name}\n\n{table}")


if __name__ == "__main__":
    main()
