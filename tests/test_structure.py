"""What keeps the package readable: no circles of imports, a short way from a call to its kernel,
and no question to devices while a program is traced."""

import ast
import graphlib
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import rwkv_jax
from support.cases import Case
from support.operators import available

PACKAGE = Path(rwkv_jax.__file__).parent


def test_no_module_needs_one_that_needs_it() -> None:
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tops = ast.parse(path.read_text()).body
        imports = [x for x in tops if isinstance(x, ast.Import | ast.ImportFrom)]
        modules = [(getattr(x, "module", None), z.name) for x in imports for z in x.names]
        needed = {y for m, z in modules for y in (m or z, f"{m}.{z}")}
        # A package that imports from itself names the module that it wants.
        graph[name] = {x for x in needed if x != name and not name.startswith(f"{x}.")}
    graphlib.TopologicalSorter(graph).prepare()


def test_who_asks_for_devices() -> None:
    """`_native/gpus.py` alone, for all GPUs of the process, and what a user starts, which chooses
    its devices."""
    question = re.compile(r"\bjax\.(local_)?device(s|_count)\b")
    files = [x for x in PACKAGE.rglob("*.py") if question.search(x.read_text())]
    started = {"_commands", "_training"}
    assert [x for x in files if x.parent.name not in started] == [PACKAGE / "_native" / "gpus.py"]


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
