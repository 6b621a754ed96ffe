"""What keeps the package readable: no circles of imports, arguments by name, a short way from a
call to its kernel, and no question to devices while a program is traced."""

import ast
import graphlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rwkv_jax
from support.cases import Case
from support.operators import available

PACKAGE = Path(rwkv_jax.__file__).parent
SOURCES = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def _module(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module) -> set[str]:
    """What a module imports while it is imported itself."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_module_needs_one_that_needs_it() -> None:
    modules = {_module(path): tree for path, tree in SOURCES.items()}
    graph = {}
    for name, tree in modules.items():
        needed = _imports(tree) & modules.keys()
        # A package that imports from itself names the module that it wants.
        graph[name] = {x for x in needed if not name.startswith(f"{x}.") and x != name}
    graphlib.TopologicalSorter(graph).prepare()


def _nodes(kind: type[Any]) -> Iterator[tuple[Path, Any]]:
    for path, tree in SOURCES.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kind))


def test_arguments_have_names() -> None:
    calls = [(path, node) for path, node in _nodes(ast.Call) if ast.unparse(node.func) == "locals"]
    assert not calls


def test_who_asks_for_devices() -> None:
    """`_native/gpus.py` alone, for all GPUs of the process, and commands, which do not trace."""
    names = {"devices", "local_devices", "device_count", "local_device_count"}
    asking = {
        path.relative_to(PACKAGE)
        for path, node in _nodes(ast.Attribute)
        if ast.unparse(node.value) == "jax" and node.attr in names
    }
    assert {x for x in asking if x.parent.name != "_commands"} == {Path("_native/gpus.py")}


@pytest.mark.skipif("ffi" not in available("wkv7", Case(2, 16, 2, 32)), reason="no native kernels")
def test_the_way_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the public function to the FFI, under `jit`, an operand goes through ten functions."""
    ways, call = [], jax.ffi.ffi_call

    def spy(*args, **options):
        frames = traceback.extract_stack()
        ways.append([x.name for x in frames if Path(x.filename).is_relative_to(PACKAGE)])
        return call(*args, **options)

    monkeypatch.setattr(jax.ffi, "ffi_call", spy)
    x = jnp.ones((2, 16, 2, 32))
    jax.clear_caches()
    jax.jit(lambda x: rwkv_jax.wkv7(x, -x, x, x, x, x, decay="log")).trace(x)
    assert {way[0] for way in ways} == {"wkv7"}
    assert max(map(len, ways)) <= 10
