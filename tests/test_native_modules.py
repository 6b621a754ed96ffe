"""What native modules say of themselves: constants, and how CUDA kernels run on any GPU, which
takes no GPU to ask."""

import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rwkv_jax
from support import emulation, internals
from support.cases import CU_SEQLENS, GPUS, Case
from support.harness import suits_matrix_units
from support.operators import OPERATORS, SEQUENCES

pytestmark = pytest.mark.quick("platform", "op")

PRESENT = [platform for platform in ("cpu", "cuda") if internals.missing(platform) is None]

MATRIX_UNITS = "CUDA kernels on matrix units, bfloat16 with float32 sums"
MATRIX_UNITS_FLOAT32 = MATRIX_UNITS.replace("bfloat16", "two bfloat16 of each number")
BY_TOKEN = "CUDA kernels, one token at a time in float32"
BY_CHANNEL = "CUDA kernels, runs of tokens side by side in float32"

each_op = pytest.mark.parametrize("op", SEQUENCES)


@pytest.mark.parametrize("platform", PRESENT)
def test_constants_are_those_of_python(platform: str) -> None:
    found = internals.native_module(platform).constants()
    assert found == pytest.approx(internals.constants_of_python(platform), rel=1e-7)


@pytest.mark.parametrize("platform", PRESENT)
def test_targets_are_those_of_python(platform: str) -> None:
    found = set(internals.native_module(platform).registrations())
    needed, more = ("fwd", "bwd", "step"), ("transition", "reverse_transition")
    assert found >= set().union(*(internals.targets(op, *needed) for op in SEQUENCES))
    of_operators = (internals.targets(op, *needed, *more) for op in SEQUENCES)
    assert found.difference(*of_operators) == internals.other_targets(platform)


def _problems(op: str) -> Iterator[dict[str, int]]:
    """Problems of all kinds, as native code knows them."""
    axes = {
        "tokens": (0, 1, 15, 16, 100, 4096, 131072),
        "rows": (0, 1, 8),
        "heads": (1, 2000) if op == "wkv4" else (1, 12, 64),
        "head_size": (1,) if op == "wkv4" else (16, 24, 64, 128),
        "decay": range(len(OPERATORS[op].decays)),
        "exact": (0, 1),
        "packing": (0, 1, 2),
        "dtype": (0, 1),
        "saves": (0, 1),
    }
    for values in itertools.product(*axes.values()):
        problem = dict(zip(axes, values, strict=True))
        sequences = problem["rows"] * (5 if problem["packing"] == 2 else 1)
        yield problem | {"sequences": sequences, "value_size": problem["head_size"]}


def _details(
    op: str, case: Case, gpu: str, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[str | None, bool]:
    """How the native kernels run a case on a GPU, and whether it suits matrix units."""
    internals.pretend_gpu(monkeypatch, *GPUS[gpu])
    inputs, _ = OPERATORS[op].make(OPERATORS[op].suited(case))
    shapes = [inputs[name] for name in OPERATORS[op].inputs]
    options = {"decay": OPERATORS[op].suited(case).decay, "precision": None} | options
    found = rwkv_jax.implementations(op, *shapes, platform="cuda", **options)
    return found["ffi"].description, suits_matrix_units(op, inputs, **options)


if "cuda" in PRESENT:

    @each_op
    def test_scratch_is_enough_on_every_gpu(op: str) -> None:
        module = internals.native_module("cuda")
        for problem, name in itertools.product(_problems(op), ("fwd", "bwd")):
            room = module.scratch(op, name, **problem)
            for multiprocessors, shared_memory in GPUS.values():
                gpu = {"multiprocessors": multiprocessors, "shared_memory": shared_memory}
                plan = module.plan(op, name, **gpu, **problem)
                assert 0 <= plan["scratch"] <= room, (name, problem, gpu)
                chunks, splits = -(-problem["tokens"] // internals.CHUNK), plan["splits"]
                if op != "wkv4" and problem["packing"] != 2 and splits > 1:
                    # All but the last have as many chunks, and that one has some.
                    assert (splits - 1) * -(-chunks // splits) < chunks
                # Kernels on matrix units run wherever they suit the problem and fit the GPU.
                fits = 0 < plan["shared_memory"] <= shared_memory
                assert (plan["kernel"] == "matrix units") == fits

    @each_op
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("packing", [None, "cu_seqlens", "segment_ids"])
    def test_which_kernels_run(
        op: str, dtype: str, packing: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokens = 16 if packing is None else int(CU_SEQLENS[-1])
        values = {"cu_seqlens": CU_SEQLENS, "segment_ids": np.ones((1, tokens), np.int32)}
        options = {} if packing is None else {packing: values[packing]}
        by_token = BY_CHANNEL if op == "wkv4" else BY_TOKEN
        cases = [
            *(Case(1, tokens, 1, size, dtype=dtype) for size in (32, 64, 128)),
            Case(1, tokens, 1, 64, dtype=dtype, decay="log"),
            Case(1, tokens, 1, 64),
        ]
        if packing is None:
            cases.append(Case(1, tokens - 1, 1, 64, dtype=dtype))
        which = set[bool]()
        for case, precision in itertools.product(cases, (None, "highest")):
            details, suits = _details(op, case, "9.0", monkeypatch, precision=precision, **options)
            if op != "wkv4" and (case.dtype, precision) == ("float32", None):
                assert details == MATRIX_UNITS_FLOAT32
                continue
            kernels, _, why = str(details).partition(": ")
            assert kernels == (MATRIX_UNITS if suits else by_token)
            assert bool(why) == (kernels == BY_TOKEN)
            which.add(suits)
        assert which == ({False} if op == "wkv4" else {False, True})
        if packing is None:
            # The backward pass of large heads needs more shared memory than a block has there.
            details, suits = _details(op, cases[2], "8.9", monkeypatch)
            kernels = f"{MATRIX_UNITS}; backward {BY_TOKEN}: a block"
            assert str(details).startswith(kernels if suits else by_token)


ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / "docs").exists(), reason="installed without its documentation")
def test_documented_kernels(request: pytest.FixtureRequest) -> None:
    """The table of the documentation is what the script makes of the plans of native code."""
    if "cuda" in PRESENT:
        planner = internals.native_module("cuda")
    elif emulation.missing:
        pytest.skip("needs CUDA kernels, or their emulation")
    else:
        planner = request.getfixturevalue("emulation")
    script = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))
    table, page = script["kernels_table"](planner), ROOT / "docs" / "pages" / "operators.md"
    assert script["with_table"](page.read_text(), "CUDA kernels", table) == page.read_text()
