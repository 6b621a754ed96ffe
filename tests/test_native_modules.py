"""What native modules say of themselves: constants, and how CUDA kernels run on any GPU, which
takes no GPU to ask."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rwkv_jax
from support import internals
from support.cases import CU_SEQLENS, GPUS, Case
from support.operators import OPERATORS, SEQUENCES

PRESENT = [platform for platform in ("cpu", "cuda") if internals.missing(platform) is None]

MATRIX_UNITS = "CUDA kernels on matrix units, bfloat16 with float32 sums"
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
    of_operators = set[str]()
    for op in SEQUENCES:
        assert internals.targets(op, "fwd", "bwd", "step") <= found
        of_operators |= internals.targets(op, "fwd", "bwd", "step", "summary", "reverse_summary")
    assert found - of_operators == internals.other_targets(platform)


def _problems(op: str) -> Iterator[dict[str, int]]:
    """Problems of all kinds, as native code knows them."""
    axes = {
        "tokens": (0, 1, 15, 16, 100, 4096, 131072),
        "rows": (0, 1, 8),
        "heads": (1, 2000) if op == "wkv4" else (1, 12, 64),
        "head_size": (1,) if op == "wkv4" else (16, 64, 128),
        "decay": range(len(OPERATORS[op].decays)),
        "exact": (0, 1),
        "packing": (0, 1, 2),
        "dtype": (0, 1),
        "saves": (0, 1),
    }
    for values in itertools.product(*axes.values()):
        problem = dict(zip(axes, values, strict=True))
        yield problem | {"sequences": problem["rows"] * (5 if problem["packing"] == 2 else 1)}


def _details(op: str, case: Case, gpu: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """How the native kernels run a case on a GPU, and the plans of its passes."""
    internals.pretend_gpu(monkeypatch, *GPUS[gpu])
    inputs, _ = OPERATORS[op].make(case)
    shapes = [inputs[name] for name in OPERATORS[op].inputs]
    options = {"decay": OPERATORS[op].suited(case).decay, **options}
    details = rwkv_jax.implementations(op, *shapes, platform="cuda", details=True, **options)
    return details["ffi"], internals.cuda_plans(op, inputs, *GPUS[gpu], **options)


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
                assert plan["splits"] >= 1
                # Kernels on matrix units run wherever they suit the problem and fit the GPU.
                fits = 0 < plan["shared_memory"] <= shared_memory
                assert (plan["kernel"] == "matrix units") == fits

    CASES = [
        *(Case(1, 16, 1, size, dtype="bfloat16") for size in (32, 64, 128)),
        Case(1, 16, 1, 64, dtype="float16", decay="exp"),
        Case(1, 15, 1, 64, dtype="bfloat16"),
        Case(1, 300, 1, 64),
        Case(1, 300, 1, 128, dtype="bfloat16", decay="log"),
    ]

    @each_op
    @pytest.mark.parametrize("gpu", GPUS)
    def test_details_are_the_plan(op: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for case, precision, cu in itertools.product(CASES, (None, "highest"), (None, CU_SEQLENS)):
            if cu is not None and cu[-1] != case.T:
                continue
            options = {"precision": precision, "cu_seqlens": cu}
            found, plans = _details(op, case, gpu, monkeypatch, **options)
            words = {"matrix units": MATRIX_UNITS, "token by token": BY_TOKEN}
            forward, backward = (words[plan["kernel"]] for plan in plans)
            several = forward if forward == backward else f"{forward}; backward {backward}"
            assert found == (BY_CHANNEL if op == "wkv4" else several)

    @each_op
    def test_details_of_segments(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
        case = Case(1, 300, 1, 64, dtype="bfloat16")
        ids = np.ones((case.B, case.T), np.int32)
        options: dict[str, Any] = {"precision": None}
        alone, _ = _details(op, case, "9.0", monkeypatch, **options)
        inputs, _ = OPERATORS[op].make(OPERATORS[op].suited(case))
        shapes = [inputs[name] for name in OPERATORS[op].inputs]
        options |= {"segment_ids": ids, "decay": OPERATORS[op].suited(case).decay}
        found = rwkv_jax.implementations(op, *shapes, platform="cuda", details=True, **options)
        assert found["ffi"] == alone

    @pytest.mark.parametrize("packed", [False, True], ids=["alone", "sequences"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @each_op
    def test_which_kernels_run(
        op: str, dtype: str, packed: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def details(case: Case, gpu: str = "9.0", precision: str | None = None) -> str:
            cu = CU_SEQLENS if packed else None
            options = {"precision": precision, "cu_seqlens": cu}
            found, _ = _details(op, case, gpu, monkeypatch, **options)
            return found

        tokens = int(CU_SEQLENS[-1]) if packed else 16
        sizes = {"wkv7": (64, 128), "wkv6": (64,), "wkv5": (64,), "wkv4": ()}[op]
        by_token = BY_CHANNEL if op == "wkv4" else BY_TOKEN
        for size in (32, 64, 128):
            case = Case(1, tokens, 1, size, dtype=dtype)
            assert details(case) == (MATRIX_UNITS if size in sizes else by_token)
            assert details(case, precision="highest") == by_token
            # Only WKV7 has heads that decay too far for matrix units. Where sequences have lengths
            # of their own, these heads cannot be left to the other kernels.
            log = details(dataclasses.replace(case, decay="log"))
            left_out = op == "wkv7" and packed
            assert log == (MATRIX_UNITS if size in sizes and not left_out else by_token)
            if not packed:
                assert details(dataclasses.replace(case, T=15)) == by_token
        assert details(Case(1, tokens, 1, 64)) == by_token
        # Heads of 128 need more shared memory than some GPUs have.
        assert details(Case(1, tokens, 1, 128, dtype=dtype), "8.9") == by_token
