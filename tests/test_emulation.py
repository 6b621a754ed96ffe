"""The CUDA handlers and kernels run by a CPU, on emulated devices: kernels on matrix units, as the
code for sm_80 without warpgroup products, and the kernels that go token by token in float32.

The package itself makes the operands, asks for scratch and calls a target, whose handler plans the
call for the emulated device. Every block is run warp by warp in an order drawn from a seed. Results
that depend on the seed show a missing barrier.

On a machine with a GPU the same tests run the kernels there, while JAX stays on the CPU, and so
under compute-sanitizer (memcheck or racecheck):

    JAX_PLATFORMS=cpu compute-sanitizer --tool memcheck \\
        python -m pytest --kernels-on-gpu sm_90a tests/test_emulation.py
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from rwkv_jax import models as all_models
from rwkv_jax.models import rwkv7
from support import (
    harness,
    internals,
    language_models,
    layer_functions,
    models,
    tolerance,
)
from support.cases import CU_SEQLENS, Arrays, Case
from support.emulation import DEVICES, Call, Device, Emulation, needs_emulation
from support.layer_functions import ELEMENTWISE, LAYER_FUNCTIONS
from support.operators import OPERATORS, SEQUENCES, Run

pytestmark = [needs_emulation, pytest.mark.slow]


@functools.cache
def _function(op: str, *variant: Any) -> Any:
    """The public function, under a name of its own in JAX's caches for each variant."""
    return lambda *operands, **options: getattr(rwkv_jax, op)(*operands, **options)


def _found(
    emulated: Emulation, op: str, inputs: Arrays, cotangents: Arrays, seed: int = 1, **options: Any
) -> dict[str, np.ndarray]:
    """Results and gradients of an operator, the warps in an order drawn from a seed."""
    emulated.module.seed(seed)
    function = _function(op, emulated.share, internals.packing.LONG)
    found = harness.value_and_gradients(
        Run(op, "ffi"), inputs, cotangents, function=function, **options
    )
    return {name: np.asarray(x) for name, x in found.items()}


def _assert_same(found: Arrays, others: Arrays) -> None:
    for name, x in found.items():
        assert x.tobytes() == others[name].tobytes(), name


def _check(
    emulated: Emulation,
    op: str,
    case: Case,
    inputs: Arrays,
    cotangents: Arrays,
    *,
    seeds: Sequence[int] = (1, 2),
    precision: str | None = None,
    **rows: Any,
) -> dict[str, np.ndarray]:
    """Results and gradients, which are close to those of the oracle, the same for all seeds, and
    zeros for padding."""
    options = {"decay": case.decay, **rows}
    found, *others = (
        _found(emulated, op, inputs, cotangents, seed, precision=precision, **options)
        for seed in seeds
    )
    expected = harness.expected(op, inputs, cotangents, **options)
    exact = not emulated.on_matrix_units
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=exact, highest=exact) for n in found}
    harness.assert_right(found, expected, limits)
    for other in others:
        _assert_same(found, other)
    padding = rows.get("segment_ids", np.ones(1)) == 0
    for name in ("y", *(f"d{n}" for n in OPERATORS[op].timed)) if padding.any() else ():
        assert not found[name][padding].any(), name
    return found


EXACT = "highest"
"""Kernels that go token by token compute in float32 throughout."""

ALONE = [
    ("wkv7", Case(1, 16, 1, 64, dtype="bfloat16"), None, 132, 1),
    ("wkv7", Case(1, 65, 2, 64, dtype="bfloat16", decay="exp"), None, 1, 1),
    ("wkv7", Case(1, 200, 1, 64, dtype="float16", decay="log"), None, 132, 1),
    ("wkv7", Case(1, 200, 1, 64, dtype="float16"), None, 132, 0.45),
    ("wkv7", Case(1, 81, 1, 128, dtype="bfloat16"), None, 1, 1),
    ("wkv7", Case(1, 130, 1, 128, dtype="float16", decay="exp", regime="near 1"), None, 132, 1),
    ("wkv7", Case(1, 70, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), None, 1, 1),
    ("wkv7", Case(1, 200, 2, 64, dtype="bfloat16", decay="exp", regime="mixed"), None, 132, 1),
    ("wkv7", Case(1, 81, 2, 64, dtype="bfloat16"), None, 1, 1),
    ("wkv7", Case(2, 1, 1, 32, decay="log"), None, 132, 1),
    ("wkv7", Case(1, 70, 2, 16, decay="exp", regime="mixed"), EXACT, 1, 0.3),
    ("wkv7", Case(1, 133, 1, 32, dtype="float16", decay="log"), None, 132, 0.7),
    ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16"), EXACT, 132, 1),
    ("wkv7", Case(1, 69, 1, 128), None, 1, 1),
    ("wkv5", Case(1, 0, 2, 16, decay="log"), None, 132, 1),
    ("wkv6", Case(2, 1, 1, 32, decay="log"), None, 132, 1),
    ("wkv6", Case(2, 70, 2, 16, decay="exp", regime="mixed"), None, 1, 0.3),
    ("wkv5", Case(1, 133, 1, 32, dtype="float16", decay="log"), None, 132, 1),
    ("wkv6", Case(1, 70, 2, 64, decay="exp"), None, 1, 1),
    ("wkv6", Case(1, 130, 1, 64, decay="log", regime="mixed"), None, 132, 1),
    ("wkv5", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv5", Case(1, 69, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), EXACT, 1, 1),
    ("wkv6", Case(1, 130, 1, 128, decay="log"), None, 132, 0.7),
    ("wkv6", Case(1, 16, 2, 64, dtype="bfloat16", decay="exp"), None, 132, 1),
    ("wkv6", Case(2, 81, 1, 64, dtype="float16", decay="log"), None, 1, 1),
    ("wkv5", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp"), None, 1, 1),
    ("wkv6", Case(1, 130, 1, 64, dtype="bfloat16", decay="exp", regime="mixed"), None, 132, 1),
    ("wkv5", Case(1, 40, 1, 64, dtype="float16", decay="log", regime="mixed"), None, 132, 1),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log", regime="near 0"), None, 132, 1),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="exp", regime="near 1"), None, 132, 1),
    ("wkv4", Case(1, 0, 1, 32, decay="log"), None, 132, 1),
    ("wkv4", Case(2, 1, 1, 16, decay="log"), None, 132, 1),
    ("wkv4", Case(2, 69, 1, 64, decay="exp"), None, 1, 1),
    ("wkv4", Case(3, 61, 1, 66, dtype="bfloat16", decay="log", regime="mixed"), None, 1, 1),
    ("wkv4", Case(1, 300, 1, 33, decay="log"), None, 3, 1),
    ("wkv4", Case(2, 130, 1, 35, dtype="bfloat16", decay="exp"), None, 132, 1),
    ("wkv4", Case(1, 200, 1, 66, dtype="float16", decay="log"), None, 2, 1),
    ("wkv4", Case(1, 128, 1, 64, dtype="bfloat16", decay="log", regime="near 1"), None, 132, 0),
    ("wkv4", Case(1, 133, 1, 40, decay="log", regime="near 0"), None, 1, 1),
    ("wkv4", Case(1, 133, 1, 40, decay="log", regime="near 1"), None, 132, 1),
    ("wkv4", Case(2, 133, 1, 40, decay="log", regime="extreme"), None, 132, 1),
    ("wkv4", Case(2, 133, 1, 40, decay="exp", regime="mixed"), None, 4, 1),
    ("wkv4", Case(1, 133, 1, 64, dtype="bfloat16", decay="exp", regime="extreme"), None, 132, 0),
    ("wkv4", Case(1, 133, 1, 64, dtype="float16", decay="log", regime="mixed"), None, 132, 1),
    ("wkv4_step", Case(3, 1, 1, 100, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv4_step", Case(2, 1, 1, 33, decay="log", regime="mixed"), EXACT, 132, 1),
    ("wkv5_step", Case(2, 1, 1, 32, dtype="float16", decay="log"), EXACT, 132, 1),
    ("wkv6_step", Case(2, 1, 2, 64, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv7_step", Case(2, 1, 1, 128, dtype="bfloat16"), EXACT, 132, 1),
]
"""Each with a precision, the number of multiprocessors, and the share of scratch. Few
multiprocessors or little scratch mean few splits, or one; little scratch also means that few heads
at a time go token by token backwards. A step updates the state in place."""


@pytest.mark.parametrize(("op", "case", "precision", "multiprocessors", "share"), ALONE, ids=str)
def test_a_sequence_in_each_row(
    emulated: Emulation,
    op: str,
    case: Case,
    precision: str | None,
    multiprocessors: int,
    share: float,
) -> None:
    emulated.use(Device(multiprocessors), share)
    inputs, cotangents = harness.operands(op, case)
    _check(emulated, op, case, inputs, cotangents, precision=precision)


def _ids(case: Case, seed: int = 0) -> np.ndarray:
    """Rows of short segments, of long ones, and of padding here and there, at the start and at the
    end; the last row has nothing else."""
    random = np.random.default_rng(seed)
    rows = np.zeros((case.B, case.T), np.int32)
    for row, longest in zip(rows[:-1], (9, 64, 150, 90), strict=False):
        start = 0
        while start < case.T:
            length = random.integers(1, longest)
            row[start : start + length] = random.integers(0, 1 << 10) * (random.random() < 0.8)
            start += length
    return rows


SEGMENTS = [
    ("wkv7", Case(4, 70, 1, 16, decay="exp"), None, 1),
    ("wkv7", Case(4, 133, 1, 32, dtype="float16", decay="log", regime="mixed"), None, 132),
    ("wkv7", Case(2, 135, 1, 64, dtype="bfloat16"), EXACT, 132),
    ("wkv7", Case(2, 37, 1, 128), None, 132),
    ("wkv6", Case(4, 70, 1, 16, decay="exp", regime="mixed"), None, 1),
    ("wkv6", Case(3, 133, 2, 32, dtype="float16", decay="log"), None, 132),
    ("wkv6", Case(2, 135, 1, 64, dtype="bfloat16", decay="exp"), EXACT, 132),
    ("wkv6", Case(2, 37, 1, 128, decay="log"), None, 132),
    ("wkv5", Case(2, 133, 1, 64, decay="log"), None, 132),
    ("wkv4", Case(4, 70, 1, 33, decay="log"), None, 1),
    ("wkv4", Case(5, 200, 1, 64, decay="exp"), None, 132),
    ("wkv4", Case(5, 200, 1, 32, decay="log", regime="mixed"), None, 132),
    ("wkv4", Case(4, 320, 1, 66, dtype="bfloat16", decay="log"), None, 12),
    ("wkv4", Case(4, 133, 1, 35, dtype="float16", decay="exp"), None, 4),
    ("wkv4", Case(4, 200, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), None, 4),
    ("wkv4", Case(2, 4170, 1, 4, decay="log"), None, 1),
]


@pytest.mark.parametrize(("op", "case", "precision", "multiprocessors"), SEGMENTS, ids=str)
def test_segments(
    emulated: Emulation, op: str, case: Case, precision: str | None, multiprocessors: int
) -> None:
    """What is not finite in padding, or in another segment, reaches nothing."""
    emulated.use(Device(multiprocessors))
    own, ids = OPERATORS[op], _ids(case)
    inputs, cotangents = harness.operands(op, case, segment_ids=ids)
    options: dict[str, Any] = {"precision": precision, "segment_ids": ids}
    found = _check(emulated, op, case, inputs, cotangents, **options)
    assert not emulated.on_matrix_units

    poisoned = np.zeros(ids.shape, bool)
    for row, parts in enumerate(map(harness.segments_of, ids)):
        if len(parts) > 2:
            poisoned[row, parts[len(parts) // 2]] = True
    for i, name in enumerate((*own.timed, "dy")):
        x = cotangents["dy"] if name == "dy" else inputs[name]
        x[poisoned] = (np.inf, np.nan)[i % 2]
    others = _found(emulated, op, inputs, cotangents, decay=case.decay, **options)
    kept = {
        name: [a[~poisoned] if a.shape[1] == case.T else a for a in (x, others[name])]
        for name, x in found.items()
        if name.removeprefix("d") not in own.shared
    }
    for name, (x, other) in kept.items():
        assert x.tobytes() == other.tobytes(), name


IDS = np.array(
    [
        [1] * 5 + [2] * 60 + [1] * 40 + [3] * 25,
        [0] * 3 + [4] * 20 + [0] * 10 + [4] * 31 + [9] * 16 + [5, 6, 7] * 12 + [0] * 14,
    ]
)
"""The segments of rows of 130 tokens."""


@pytest.mark.parametrize(
    ("op", "case", "multiprocessors"),
    [
        ("wkv7", Case(2, 130, 1, 64, dtype="bfloat16"), 1),
        ("wkv7", Case(2, 130, 1, 64, dtype="float16", decay="log"), 132),
        ("wkv7", Case(1, 81, 1, 128, dtype="bfloat16"), 132),
        ("wkv6", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), 1),
        ("wkv6", Case(2, 130, 1, 64, dtype="float16", decay="log"), 132),
        ("wkv6", Case(2, 130, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), 2),
        ("wkv5", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), 2),
    ],
    ids=str,
)
def test_segments_on_matrix_units(
    emulated: Emulation, op: str, case: Case, multiprocessors: int
) -> None:
    """What is not finite in padding reaches nothing."""
    emulated.use(Device(multiprocessors))
    ids = IDS[: case.B, : case.T]
    inputs, cotangents = harness.operands(op, case, segment_ids=ids)
    _check(emulated, op, case, inputs, cotangents, segment_ids=ids)
    assert emulated.on_matrix_units


def test_wkv4_jumps(emulated: Emulation) -> None:
    """Keys whose weights, next to each other in one segment or in two, are out of the range of
    float32."""
    case = Case(5, 200, 1, 16, decay="log", regime="near 1")
    ids, random = _ids(case), np.random.default_rng(0)
    inputs, cotangents = harness.operands("wkv4", case)
    jumps = random.choice([0, 0, -90, 90], (case.B, case.T // 5, case.K))
    inputs["k"] += np.repeat(np.float32(jumps), 5, axis=1)
    options = {"decay": case.decay, "segment_ids": ids}
    found = _found(emulated, "wkv4", inputs, cotangents, **options)
    harness.assert_right(found, harness.expected("wkv4", inputs, cotangents, **options), 1e-4)


@pytest.mark.parametrize("marked", [False, True])
def test_wkv4_without_weight(emulated: Emulation, marked: bool) -> None:
    """Keys of -inf, of a whole run of tokens too."""
    case = Case(1, 100, 1, 16, decay="log")
    ids = np.ones((1, case.T), np.int32)
    ids[:, 90:] = 2
    options = {"decay": case.decay, **({"segment_ids": ids} if marked else {})}
    inputs, cotangents = harness.operands("wkv4", case)
    emulated.use(Device(1))
    inputs["k"][:, 13:45] = -np.inf
    found = _found(emulated, "wkv4", inputs, cotangents, **options)
    inputs["k"][:, 13:45] = -1e4
    harness.assert_right(found, harness.expected("wkv4", inputs, cotangents, **options))


SEVERAL = [
    ("wkv7", Case(1, 300, 1, 16, decay="exp", regime="mixed"), 1, 1),
    ("wkv7", Case(1, 300, 2, 32, dtype="float16", decay="log"), 132, 0.3),
    ("wkv6", Case(1, 300, 2, 16, decay="exp", regime="mixed"), 1, 0.3),
    ("wkv6", Case(1, 300, 1, 32, dtype="bfloat16", decay="log"), 132, 1),
    ("wkv5", Case(1, 300, 1, 32, decay="log"), 132, 1),
    ("wkv4", Case(1, 300, 1, 33, decay="log"), 1, 1),
    ("wkv4", Case(1, 300, 1, 40, decay="log", regime="mixed"), 28, 1),
    ("wkv4", Case(1, 300, 1, 66, dtype="bfloat16", decay="exp"), 21, 1),
    ("wkv7", Case(1, 300, 1, 64, dtype="bfloat16"), 1, 1),
    ("wkv7", Case(1, 300, 1, 64, dtype="float16"), 132, 0.6),
    ("wkv7", Case(1, 300, 1, 128, dtype="bfloat16"), 4, 1),
    ("wkv6", Case(1, 300, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), 1, 1),
    ("wkv6", Case(1, 300, 1, 64, dtype="float16", decay="exp"), 132, 1),
    ("wkv5", Case(1, 300, 1, 64, dtype="bfloat16", decay="log"), 1, 1),
]


@pytest.mark.parametrize(("op", "case", "multiprocessors", "share"), SEVERAL, ids=str)
def test_sequences(
    emulated: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    case: Case,
    multiprocessors: int,
    share: float,
) -> None:
    """Sequences of different lengths in a row, to which its first and last tokens do not belong."""
    emulated.use(Device(multiprocessors), share)
    cu = np.minimum(CU_SEQLENS + 3, case.T - 2)
    _check_sequences(emulated, monkeypatch, op, case, cu)


def _check_sequences(
    emulated: Emulation, monkeypatch: pytest.MonkeyPatch, op: str, case: Case, cu: np.ndarray
) -> None:
    """Which sequence runs first makes no difference."""
    inputs, cotangents = harness.operands(op, case, cu_seqlens=cu)
    internals.take_longest_first(monkeypatch, False)
    found = _check(emulated, op, case, inputs, cotangents, seeds=[1], cu_seqlens=cu)
    internals.take_longest_first(monkeypatch, True)
    options = {"precision": None, "decay": case.decay, "cu_seqlens": cu}
    _assert_same(found, _found(emulated, op, inputs, cotangents, 2, **options))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("wkv7", Case(1, 200, 1, 16, decay="exp")),
        ("wkv6", Case(1, 200, 1, 16, decay="log")),
        ("wkv4", Case(1, 200, 1, 16, decay="log")),
        ("wkv7", Case(1, 200, 1, 64, dtype="bfloat16")),
        ("wkv6", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp")),
    ],
    ids=str,
)
def test_sequences_that_are_wrong(
    emulated: Emulation, monkeypatch: pytest.MonkeyPatch, op: str, case: Case, seed: int
) -> None:
    """Numbers of any size in any order are those that they are clamped to."""
    random = np.random.default_rng(seed)
    sizes = random.choice([10, 300, 1 << 31], 6)
    cu = np.array([random.integers(-size, size) for size in sizes], np.int32)
    emulated.use(Device(1 + 131 * seed))
    _check_sequences(emulated, monkeypatch, op, case, cu)


ROWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "segments": {"segment_ids": np.repeat(np.array([[3, 0, 4, 5]]), [20, 9, 21, 20], axis=1)},
    "sequences": {"cu_seqlens": np.array([0, 3, 3, 67, 70], np.int32)},
}
SUMMARIES = [
    ("wkv7", Case(1, 70, 2, 64, dtype="bfloat16"), "alone"),
    ("wkv7", Case(2, 16, 1, 128, dtype="float16"), "alone"),
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "segments"),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log"), "segments"),
    ("wkv5", Case(1, 70, 1, 64, dtype="float16", decay="exp"), "alone"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case", "rows"), SUMMARIES, ids=str)
def test_summaries(emulated: Emulation, op: str, case: Case, rows: str, device: str) -> None:
    """What all tokens do to a state, and to its gradient, without the state."""
    emulated.use(DEVICES[device])
    inputs, cotangents = harness.operands(op, case, **ROWS[rows])
    packing = None if rows == "alone" else internals.marks_of(**ROWS[rows])
    options = {"decay": case.decay, "implementation": "ffi", "precision": None}
    forward = dataclasses.replace(internals.forward_operands(op, inputs, packing), state={})
    backward = internals.backward_operands(op, inputs, {}, cotangents, packing)
    summary = internals.run_pass(op, "summary", forward, **options)
    reverse = internals.run_pass(op, "reverse_summary", backward, **options)
    assert [plan["kernel"] for plan in emulated.plans] == ["matrix units"] * 2

    def final_state(start: np.ndarray) -> dict[str, Any]:
        state = internals.summary(op).apply(summary, {"state": jnp.asarray(start)})
        given = inputs | {"initial_state": start}
        expected = harness.expected(op, given, cotangents, decay=case.decay, **ROWS[rows])
        limit = tolerance.ceiling("final_state", case.dtype, sequential=False, highest=False)
        harness.assert_right({"final_state": state["state"]}, expected, {"final_state": limit})
        return expected

    final_state(np.zeros_like(inputs["initial_state"]))
    expected = final_state(inputs["initial_state"])
    limit = tolerance.ceiling("dinitial_state", case.dtype, sequential=False, highest=False)
    found = {"dinitial_state": reverse["state"]}
    harness.assert_right(found, expected, {"dinitial_state": limit})


ON_DEVICES = [
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "alone"),
    ("wkv7", Case(1, 70, 1, 64, dtype="float16", decay="log"), "alone"),
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "sequences"),
    ("wkv7", Case(1, 70, 1, 128, dtype="bfloat16"), "segments"),
    ("wkv7", Case(1, 70, 1, 128, dtype="bfloat16"), "sequences"),
    ("wkv7", Case(1, 9, 1, 128), "alone"),
    ("wkv6", Case(1, 70, 1, 64, dtype="float16", decay="exp"), "alone"),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log"), "sequences"),
    ("wkv6", Case(1, 9, 1, 128, decay="log"), "alone"),
    ("wkv6", Case(1, 70, 1, 128, decay="exp"), "segments"),
    ("wkv6", Case(1, 70, 1, 128, dtype="bfloat16", decay="log"), "alone"),
    ("wkv6", Case(1, 70, 1, 128, dtype="bfloat16", decay="log"), "sequences"),
    ("wkv5", Case(1, 70, 1, 128, decay="log"), "alone"),
    ("wkv5", Case(1, 70, 1, 128, decay="log"), "sequences"),
    ("wkv5", Case(1, 70, 1, 128, dtype="bfloat16", decay="exp"), "segments"),
    ("wkv5", Case(1, 70, 1, 64, dtype="bfloat16", decay="log"), "segments"),
    ("wkv4", Case(1, 70, 1, 33, decay="log"), "alone"),
    ("wkv7_step", Case(1, 1, 1, 128, dtype="bfloat16"), "alone"),
    ("wkv6_step", Case(1, 1, 1, 64, decay="log"), "alone"),
    ("wkv5_step", Case(1, 1, 1, 64, decay="log"), "alone"),
    ("wkv4_step", Case(1, 1, 1, 33, decay="log"), "alone"),
]
"""Of 70 tokens each, so that there are two chunks, where kernels on matrix units may take them."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case", "rows"), ON_DEVICES, ids=str)
def test_devices(emulated: Emulation, op: str, case: Case, rows: str, device: str) -> None:
    """Every device runs every call, on matrix units unless it has too little shared memory."""
    emulated.use(DEVICES[device])
    inputs, cotangents = harness.operands(op, case, **ROWS[rows])
    _check(emulated, op, case, inputs, cotangents, seeds=[1], **ROWS[rows])
    assert emulated.plans
    for plan in emulated.plans:
        suits = 0 < plan["shared_memory"] <= DEVICES[device].shared_memory
        assert suits == (plan["kernel"] == "matrix units"), plan


def test_a_handler_refuses(emulated: Emulation) -> None:
    """An error has the code and the text of the handler."""
    x = np.zeros((1, 1, 16), np.float32)
    with pytest.raises(RuntimeError, match=r"INVALID_ARGUMENT: wkv7_step: w is missing"):
        emulated.module.call("rwkv_wkv7_step_v2", [x], [x.copy()], {"decay": 2})


Layer = layer_functions.Case

LAYERS = [
    *(
        ("norm_shift_mix", Layer(*case))
        for case in [
            (2, 70, 1, 48, "float32", 6, True),
            (2, 130, 1, 48, "bfloat16", 1),
            (1, 129, 1, 16, "float16", 6, True),
            (3, 65, 1, 16, "float32", 1, True),
            (1, 66, 1, 320, "bfloat16", 6),
            (1, 9, 1, 320, "float16", 1, True),
            (1, 67, 1, 768, "bfloat16", 6, True),
            (2, 33, 1, 768, "float32", 1),
            (1, 17, 1, 2048, "bfloat16", 6),
            (1, 9, 1, 2048, "float32", 6, True),
            (1, 5, 1, 2560, "bfloat16", 6, True),
            (1, 18, 1, 2560, "float16", 1),
            (2, 3, 1, 4096, "bfloat16", 6, True),
            (1, 9, 1, 4096, "float32", 6),
            (1, 2, 1, 4096, "float16", 1),
            (1, 1, 1, 48, "float32", 6),
            (2, 64, 1, 64, "bfloat16", 6),
            (2, 0, 1, 32, "bfloat16", 6),
            (0, 5, 1, 32, "float32", 1),
        ]
    ),
    *(
        (name, Layer(*case))
        for name in ELEMENTWISE
        if name != "norm_shift_mix"
        for case in [
            (2, 70, 3, 16, "float32"),
            (1, 130, 1, 32, "float16"),
            (2, 65, 5, 64, "bfloat16"),
            (1, 17, 2, 128, "bfloat16"),
            (1, 66, 3, 256, "float16"),
            (1, 3, 9, 256, "float32"),
            (1, 2, 40, 64, "bfloat16"),
            (3, 1, 1, 16, "bfloat16"),
            (1, 64, 2, 16, "float32"),
            (2, 0, 2, 64, "bfloat16"),
            (0, 5, 2, 64, "float32"),
        ]
    ),
]
"""Rows, tokens, heads, channels of each, and for `norm_shift_mix` the mixes and whether `origin` is
given. Some have fewer channels than a warp takes, or more than a block."""


@functools.cache
def _emulated_layer(name: str) -> Any:
    """The function, under a name of its own in JAX's caches."""
    return lambda **arguments: LAYER_FUNCTIONS[name].call(**arguments)


def _layer(emulated: Emulation, name: str, case: Layer, seed: int = 1) -> dict[str, jax.Array]:
    emulated.module.seed(seed)
    return layer_functions.check(name, "ffi", case, _emulated_layer(name))


@pytest.mark.parametrize(("name", "case"), LAYERS, ids=str)
def test_layers(emulated: Emulation, name: str, case: Layer) -> None:
    """Results and gradients are close to those of the oracle, and the same for all seeds."""
    found, other = (
        {n: np.asarray(x) for n, x in _layer(emulated, name, case, seed).items()} for seed in (1, 2)
    )
    _assert_same(found, other)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_layers_on_devices(emulated: Emulation, name: str, device: str) -> None:
    emulated.use(DEVICES[device])
    _layer(emulated, name, Layer(1, 70, 2, 64, "bfloat16", origin=True))


@pytest.mark.parametrize(
    "case", [Layer(1, 3, 1, 2048, "bfloat16"), Layer(1, 2, 1, 4096, mixes=1)], ids=str
)
@pytest.mark.parametrize("device", DEVICES)
def test_wide_tokens_on_devices(emulated: Emulation, case: Layer, device: str) -> None:
    """Some devices have no room to copy them ahead."""
    emulated.use(DEVICES[device])
    _layer(emulated, "norm_shift_mix", case)


LAYER_CALL = Layer(2, 3, 2, 16, "bfloat16", origin=True)


class LayerCall(NamedTuple):
    """A call of a target, with its arrays by name in their order."""

    target: str
    operands: dict[str, np.ndarray]
    results: dict[str, np.ndarray]
    attributes: Mapping[str, int] = MappingProxyType({})


def _layer_calls(emulated: Emulation, name: str, case: Layer = LAYER_CALL) -> list[LayerCall]:
    """The calls of the forward and of the backward pass."""
    calls = []

    def look(call: Call, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        calls.append((call.target, operands, list(map(np.zeros_like, results))))

    own = LAYER_FUNCTIONS[name]
    arrays = jax.tree.map(jnp.asarray, layer_functions.operands(name, case))
    emulated.look = look
    with jax.disable_jit():
        layer_functions.value_and_gradients(name, "ffi", *arrays)
    emulated.look = None
    origin = ["origin"] if name == "norm_shift_mix" else []
    inputs = [*own.tensors, "parameters", *origin]
    kept = ["moments"] if name == "norm_shift_mix" else []
    results = [n.replace("mixed", "mixed ") for n in own.results]
    fresh = [n for n in results if n != "passed" and not n.endswith("_again")]
    names = [
        (inputs, [*fresh, *kept]),
        ([*inputs, *kept, *(f"d{n}" for n in results)], [f"d{n}" for n in own.tensors]),
    ]
    names[1][1].append("partials")
    return [
        LayerCall(
            target, *(dict(zip(n, x, strict=True)) for n, x in zip(several, given, strict=True))
        )
        for several, (target, *given) in zip(names, calls, strict=True)
    ]


def _refused(emulated: Emulation, call: LayerCall) -> str:
    operands, results = (list(x.values()) for x in call[1:3])
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT: ") as error:
        emulated.module.call(call.target, operands, results, dict(call.attributes))
    return str(error.value)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_layers_refuse_wrong_arrays(emulated: Emulation, name: str) -> None:
    """Every operand and result that is missing or has another shape or dtype is named."""
    for call in _layer_calls(emulated, name):
        for kind in ("operands", "results"):
            arrays = getattr(call, kind)
            names = list(arrays)

            def error(changed: Any, call: LayerCall = call, kind: str = kind) -> str:
                return _refused(emulated, call._replace(**{kind: changed}))

            for i, n in enumerate(names):
                fewer = {other: arrays[other] for other in names[:i]}
                assert f"{name}: {n} is missing" in error(fewer)
                x = arrays[n]
                rank = error(arrays | {n: x[None]})
                assert f"{name}: {n} has shape [1, " in rank
                # The first array that has an axis sets its size: a later one is then odd.
                longer = error(arrays | {n: np.concatenate([x, x], axis=-1)})
                assert f"{name}: " in longer
                assert re.search(rf"\b{n} has ", longer), longer
                dtype = np.int32 if x.dtype != np.int32 else np.float32
                assert f"{name}: {n} is " in error(arrays | {n: x.astype(dtype)})
            more = error(arrays | {"one more": next(iter(arrays.values()))})
            assert f"{len(arrays) + 1} {kind} given; expected {len(arrays)}" in more


WRONG_SIZES = {
    "width": ("norm_shift_mix", Layer(1, 2, 1, 17), "x has D = 17; expected a multiple of 16"),
    "large": ("norm_shift_mix", Layer(1, 2, 1, 4112), "x has D = 4112; expected a multiple of 16"),
    "mixes": ("norm_shift_mix", Layer(1, 2, 1, 16, mixes=3), "parameters has J = 5; expected 3"),
    **{
        f"{name} of {size}": (
            *(name, Layer(1, 2, 1, size)),
            f"K = {size}; expected a power of two from 16 to 256",
        )
        for name in ELEMENTWISE
        if name != "norm_shift_mix"
        for size in (8, 48, 512)
    },
}


@pytest.mark.parametrize("wrong", WRONG_SIZES)
def test_layers_refuse_sizes(
    emulated: Emulation, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """Which Python leaves to other implementations."""
    name, case, message = WRONG_SIZES[wrong]
    monkeypatch.setattr(internals.layers.Function, "why_no_kernel", lambda *_: None)
    inputs, _ = layer_functions.operands(name, case)
    with pytest.raises(Exception, match=f"INVALID_ARGUMENT: {name}: {message}"):
        jax.block_until_ready(LAYER_FUNCTIONS[name].call(**inputs, implementation="ffi"))


def test_layers_refuse_other_counts(emulated: Emulation) -> None:
    forward, backward = _layer_calls(emulated, "norm_shift_mix")
    for call in (forward, backward):
        kind = "results" if call is forward else "operands"
        three = np.zeros((2, 3, 3), np.float32)
        changed = getattr(call, kind) | {"moments": three}
        assert "moments has E = 3; expected 2" in _refused(
            emulated, call._replace(**{kind: changed})
        )
    x = backward.results["partials"]
    for shape, message in (
        ((2, 2, *x.shape[2:]), "partials has N = 2; expected 1"),
        ((2, 1, 7, x.shape[3]), "so J = 7, where parameters has J = 8"),
    ):
        changed = backward.results | {"partials": np.zeros(shape, np.float32)}
        assert message in _refused(emulated, backward._replace(results=changed))
    keys, _ = _layer_calls(emulated, "wkv7_keys")
    changed = keys.operands | {"parameters": keys.operands["parameters"][:, :2].copy()}
    assert "parameters has J = 2; expected 4" in _refused(emulated, keys._replace(operands=changed))


def _read_out_calls(emulated: Emulation, case: Layer, seed: int = 1) -> dict[str, LayerCall]:
    """The calls of `projected_read_out`, and of the two functions one after the other."""
    calls = {}
    names = {
        "operands": [*LAYER_FUNCTIONS["read_out"].tensors, "parameters", "dout"],
        "results": ["dy", "dbonus", "dv", "dgate", "partials", "out"],
    }

    def look(call: Call, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        of_results = ["out"] if "fwd" in call.target else names["results"][: len(results)]
        given = dict(zip(names["operands"], operands, strict=False))
        found = dict(zip(of_results, results, strict=True))
        calls[call.target] = LayerCall(call.target, given, found)

    emulated.module.seed(seed)
    name = "projected_read_out"
    arrays = jax.tree.map(jnp.asarray, layer_functions.operands(name, case))
    right = layer_functions.expected(name, *arrays)
    emulated.look = look
    with jax.disable_jit():
        for function in (None, layer_functions.read_out_and_product):
            found = layer_functions.value_and_gradients(name, "ffi", *arrays, function=function)
            layer_functions.assert_right(name, found, right, case.dtype)
    emulated.look = None
    return calls


RESTORED = [
    Layer(*case)
    for case in [
        (2, 70, 3, 16, "float32"),
        (1, 130, 1, 32, "float16"),
        (2, 65, 5, 64, "bfloat16"),
        (1, 17, 2, 128, "bfloat16"),
        (1, 3, 9, 256, "float16"),
        (3, 1, 1, 64, "bfloat16"),
        (2, 0, 2, 64, "bfloat16"),
        (0, 5, 2, 64, "float32"),
    ]
]


@pytest.mark.parametrize("case", RESTORED, ids=str)
def test_read_out_is_restored(emulated: Emulation, case: Layer) -> None:
    """The backward pass writes the bits of the forward pass, and the gradients that it computes
    without that. No result is left as it was."""
    calls = [_read_out_calls(emulated, case, seed) for seed in (1, 2)]
    if 0 in (case.B, case.T):
        return  # All results are right, and empty.
    forward, restoring = internals.projected_read_out.RESTORING.targets
    (backward,) = calls[0].keys() - {forward, restoring}
    for one in calls:
        found = one[restoring].results
        _assert_same(one[forward].results | one[backward].results, found)
        assert all(np.isfinite(x.astype(np.float32)).all() for x in found.values())
        _assert_same(found, calls[0][restoring].results)


def test_restoring_refuses_wrong_arrays(emulated: Emulation) -> None:
    """The result that is restored, as all others."""
    target = internals.projected_read_out.RESTORING.targets[1]
    call = _read_out_calls(emulated, LAYER_CALL)[target]
    results = call.results
    out = results.pop("out")

    def error(**changed: np.ndarray) -> str:
        return _refused(emulated, call._replace(results=results | changed))

    assert "read_out: out is missing" in error()
    assert "read_out: out has shape [1, " in error(out=out[None])
    assert "read_out: out is F32" in error(out=out.astype(np.float32))
    assert "7 results given; expected 6" in error(out=out, more=out)


KEYED = [
    ("9.0", Layer(1, 1, 2, 64, "bfloat16"), False),
    ("9.0", Layer(3, 63, 1, 64, "float16"), False),
    ("9.0", Layer(1, 64, 1, 64, "bfloat16", without=("initial_state",)), False),
    ("9.0", Layer(3, 65, 2, 64, "bfloat16"), False),
    ("9.0", Layer(1, 200, 3, 64, "float16"), False),
    ("9.0", Layer(2, 130, 2, 64, "bfloat16"), True),
    ("9.0", Layer(2, 130, 1, 64, "float16"), True),
    ("9.0", Layer(0, 65, 2, 64, "bfloat16"), False),
    ("9.0", Layer(2, 0, 2, 64, "bfloat16"), False),
    ("8.0", Layer(1, 70, 2, 64, "bfloat16"), False),
    ("8.9", Layer(1, 130, 2, 64, "bfloat16"), False),
    ("8.9", Layer(2, 130, 1, 64, "float16"), True),
]
"""Each with a device and whether the rows have the segments of IDS."""


@pytest.mark.parametrize(("device", "case", "marked"), KEYED, ids=str)
def test_keyed_wkv7(emulated: Emulation, device: str, case: Layer, marked: bool) -> None:
    """Results and the gradients of tensors are, bit for bit, those of one function after the other;
    the gradients of parameters are summed in another order. For a few tokens, and on small devices,
    both functions are called."""
    emulated.use(DEVICES[device])
    name, own = "keyed_wkv7", LAYER_FUNCTIONS["keyed_wkv7"]
    inputs, cotangents = layer_functions.operands(name, case)
    inputs |= {"segment_ids": IDS} if marked else {}

    def found(function: Any, seed: int) -> dict[str, np.ndarray]:
        emulated.module.seed(seed)
        every = layer_functions.value_and_gradients(
            name, "ffi", inputs, cotangents, function=function
        )
        return {name: np.asarray(x) for name, x in every.items()}

    # Functions of their own in JAX's caches, which know no device.
    one, two = (functools.partial(x) for x in (own.call, layer_functions.keys_and_wkv7))
    (fused, other), apart = (found(one, seed) for seed in (1, 2)), found(two, 1)
    right = layer_functions.expected(name, inputs, cotangents)
    layer_functions.assert_right(name, fused, right, case.dtype)
    _assert_same(fused, other)
    sums = {f"d{name}" for name in own.parameters}
    _assert_same({n: x for n, x in fused.items() if n not in sums}, apart)
    tolerance.assert_close({n: fused[n] for n in sums}, {n: apart[n] for n in sums}, 1e-6)
    in_one = case.T >= 16 and device != "8.9"
    forward, backward = (emulated.files.get(x) for x in internals.keyed_wkv7.TARGETS.values())
    if case.B == 0:
        assert not forward
    elif in_one:
        assert forward == {"wkv7_keys.cu", "scan.cu"}
        assert backward == {"scan.cu", "gradients.cu"}
    else:
        assert forward is backward is None


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_keyed_wkv7_refuses_wrong_arrays(emulated: Emulation, name: str) -> None:
    """Those that the targets take besides the arrays of `wkv7`."""
    calls = {}

    def look(call: Call, operands: list[np.ndarray], results: list[np.ndarray]) -> None:
        calls[call.target] = operands, list(map(np.zeros_like, results)), call.attributes

    arrays = layer_functions.operands("keyed_wkv7", Layer(2, 16, 1, 64, "bfloat16"))
    call = functools.partial(LAYER_FUNCTIONS["keyed_wkv7"].call)
    emulated.look = look
    jax.block_until_ready(
        layer_functions.value_and_gradients("keyed_wkv7", "ffi", *arrays, function=call)
    )
    emulated.look = None
    target = internals.keyed_wkv7.TARGETS[name]
    operands, results, attributes = calls[target]
    forward = name == "forward"
    names = ("parameters",) if forward else ("parameters", "inverse", "dbonus")
    given = ("bonus", "inverse") if forward else ("partials",)
    title = "wkv7" if forward else "wkv7 backward"

    def error(operands: Any = operands, results: Any = results, **changed: int) -> str:
        with pytest.raises(RuntimeError, match=f"INVALID_ARGUMENT: {title}: ") as caught:
            emulated.module.call(target, operands, results, attributes | changed)
        return str(caught.value)

    for i, own in enumerate(names, len(operands) - len(names)):
        x = operands[i]
        assert f"{own} is missing" in error(operands[:i])
        assert f"{own} has shape [1, " in error([*operands[:i], x[None], *operands[i + 1 :]])
        wrong = x.astype(np.int32)
        assert f"{own} is S32" in error([*operands[:i], wrong, *operands[i + 1 :]])
    for i, own in enumerate(given, len(results) - len(given)):
        assert f"{own} is missing" in error(results=results[:i])
        longer = np.concatenate(2 * [results[i]], axis=1)
        assert f"{own} has shape [2, " in error(results=[*results[:i], longer, *results[i + 1 :]])
    more = np.zeros((2, 5, 1, 64), np.float32)
    before = operands[: len(operands) - len(names)]
    assert "parameters has J = 5" in error([*before, more, *operands[len(before) + 1 :]])
    assert "decay is 0; expected 2 (sigmoid)" in error(decay=0)
    halves = [x[..., :32].copy() if x.shape[-1] == 64 else x for x in (*operands, *results)]
    halves = [
        x[..., :32, :].copy() if x.ndim in (4, 5) and x.shape[-2] == 64 else x for x in halves
    ]
    assert "K = 32; expected 64" in error(halves[: len(operands)], halves[len(operands) :])
    if not forward:
        emulated.use(DEVICES["8.9"])
        assert "T = 16 on a device with 101376 bytes of shared memory for a block" in error()


def test_targets_and_constants_are_those_of_python(emulated: Emulation) -> None:
    names = ("fwd", "bwd", "step", "summary", "reverse_summary")
    operators = set().union(*(internals.targets(op, *names) for op in SEQUENCES))
    found = set(emulated.module.targets())
    assert found - operators == internals.other_targets()
    for op in SEQUENCES:
        assert internals.targets(op, *names[:3]) <= found
    constants = emulated.module.layer_constants()
    assert constants == pytest.approx(internals.layer_constants(), rel=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("vocabulary", "device"), [(8, "9.0"), (1000, "9.0"), (16392, "9.0"), (32776, "12.0")]
)
def test_cross_entropy(emulated: Emulation, vocabulary: int, device: str, dtype: str) -> None:
    """Losses and gradients of logits. The last vocabulary has logits that shared memory has no room
    for; one token does not count, one has a target outside the vocabulary, and the largest logit of
    one stands twice."""
    emulated.use(DEVICES[device])
    emulated.module.seed(1)
    generator = np.random.default_rng(vocabulary)
    logits = (3 * generator.standard_normal((4, vocabulary))).astype(np.float32)
    logits[2, [1, 5]] = logits.max() + 1
    targets = generator.integers(0, vocabulary, 4).astype(np.int32)
    targets[3] = vocabulary
    scale = np.array([1.0, 0.0, 0.25, 0.5], np.float32)
    z_loss, l2_wrap = 0.02, 0.03
    loss, dlogits = np.zeros(4, np.float32), np.zeros(logits.shape, jnp.dtype(dtype))
    coefficients = np.array([z_loss, l2_wrap], np.float32)
    operands = [logits, targets, scale, coefficients]
    emulated.module.call("rwkv_cross_entropy_v1", operands, [loss, dlogits], {})

    z = logits.astype(np.float64)
    log_sum = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    expected = np.exp(z - log_sum[:, None]) * (1 + 2 * z_loss * log_sum[:, None])
    expected[np.arange(3), targets[:3]] -= 1
    expected[np.arange(4), z.argmax(1)] += l2_wrap * z.max(1)
    losses = log_sum[:3] - z[np.arange(3), targets[:3]] + z_loss * log_sum[:3] ** 2
    np.testing.assert_allclose(loss[:3], losses * scale[:3], rtol=1e-5)
    assert np.isnan(loss[3])
    wrong = tolerance.rms_error(dlogits.astype(np.float32), expected * scale[:, None])
    assert wrong < {"float32": 1e-5}.get(dtype, 3e-3)


def test_cross_entropy_refuses_wrong_arrays(emulated: Emulation) -> None:
    arrays = {
        "logits": np.zeros((2, 16), np.float32),
        "targets": np.zeros(2, np.int32),
        "scale": np.zeros(2, np.float32),
        "coefficients": np.zeros(2, np.float32),
    }
    results = {"loss": np.zeros(2, np.float32), "dlogits": np.zeros((2, 16), np.float32)}
    for change, message in (
        ({"logits": np.zeros((2, 15), np.float32)}, "logits has V = 15; expected a multiple of 8"),
        ({"targets": np.zeros(3, np.int32)}, r"targets has shape \[3\]"),
        ({"scale": np.zeros(2, np.float16)}, "scale is F16"),
        ({"coefficients": np.zeros(3, np.float32)}, "coefficients has E = 3; expected 2"),
    ):
        given = arrays | change
        made = results
        if "logits" in change:
            made = results | {"dlogits": np.zeros((2, 15), np.float32)}
        call = LayerCall("rwkv_cross_entropy_v1", given, made)
        assert re.search(f"cross_entropy: {message}", _refused(emulated, call))


def test_low_rank_maps_refuse_wrong_arrays(emulated: Emulation) -> None:
    def call(width: int = 16, activations: int = 5, **changes: np.ndarray) -> LayerCall:
        given, results = {}, {}
        for i, (rank, offset) in enumerate(((8, width), (24, 0))):
            given |= {
                f"rows {i}": np.zeros((2, 3, width), jnp.bfloat16),
                f"first {i}": np.zeros((width, rank), jnp.bfloat16),
                f"second {i}": np.zeros((rank, width), jnp.bfloat16),
                f"offset {i}": np.zeros(offset, jnp.bfloat16),
            }
            results |= {
                f"hidden {i}": np.zeros((2, 3, rank), jnp.bfloat16),
                f"y {i}": np.zeros((2, 3, width), jnp.bfloat16),
            }
        given |= {name.replace("_", " "): x for name, x in changes.items()}
        return LayerCall("rwkv_low_rank_maps_v1", given, results, {"activations": activations})

    emulated.use(DEVICES["8.0"])
    assert "compute capability 9.0 alone" in _refused(emulated, call())
    one = np.zeros(1, jnp.bfloat16)
    for wrong, message in (
        (call(offset_1=one), "offset 1 has a size of 1; expected 0 or C = 16"),
        (
            call(second_0=np.zeros((8, 17), jnp.bfloat16)),
            r"second 0 has shape \[8, 17\], so C = 17",
        ),
        (
            call(first_1=np.zeros((16, 20), jnp.bfloat16)),
            r"second 1 has shape \[24, 16\], so Q = 24",
        ),
        (call(rows_1=np.zeros((2, 4, 16), jnp.bfloat16)), r"rows 1 has shape \[2, 4, 16\]"),
        (call(rows_0=np.zeros((2, 3, 16), np.float32)), "first 0 is BF16 where rows 0 is F32"),
        (call(width=12), "rows has C = 12; expected a multiple of 8"),
        (call(activations=9), "activations is 9; expected 2 digits to the base 3"),
        (call(activations=-1), "activations is -1; expected"),
        (call(more=one), "9 operands given; expected 8"),
    ):
        assert re.search(f"low_rank_maps: {message}", _refused(emulated, wrong))


def test_head_cross_entropy_refuses_wrong_arrays(emulated: Emulation) -> None:
    def arrays(tokens: int, width: int, vocabulary: int, dtype: Any = jnp.bfloat16) -> LayerCall:
        floats = np.zeros(tokens, np.float32)
        given = {
            "features": np.zeros((tokens, width), dtype),
            "weight": np.zeros((vocabulary, width), dtype),
            "targets": np.zeros(tokens, np.int32),
            "of_target": floats,
            "scale": floats,
            "l2_wrap": np.zeros(1, np.float32),
        }
        results = {
            "loss": floats.copy(),
            "factors": floats.copy(),
            "exponentials": np.zeros((tokens, vocabulary), dtype),
            "bases": floats.copy(),
            "again": np.zeros(-(-tokens // 256), np.int32),
            "statistics": np.zeros((vocabulary // 256, tokens, 4), np.float32),
        }
        return LayerCall("rwkv_head_cross_entropy_v1", given, results)

    right = arrays(257, 64, 512)
    emulated.use(DEVICES["8.0"])
    assert "compute capability 9.0 alone" in _refused(emulated, right)
    for call, message in (
        (arrays(2, 64, 512, np.float16), "features are not BF16"),
        (arrays(2, 96, 512), "features has C = 96; expected a multiple of 64 up to 262144"),
        (arrays(2, 64, 300), "weight has V = 300; expected a multiple of 256 up to 262144"),
    ):
        assert message in _refused(emulated, call)
    for name, shape, message in (
        ("again", (1,), "again has R = 1; expected 2"),
        ("statistics", (1, 257, 4), "statistics has N = 1; expected 2"),
        ("statistics", (2, 257, 3), "statistics has E = 3; expected 4"),
        ("factors", (256,), "factors has shape [256]"),
    ):
        changed = right.results | {name: np.zeros(shape, right.results[name].dtype)}
        assert message in _refused(emulated, right._replace(results=changed))
    changed = right.operands | {"l2_wrap": np.zeros(2, np.float32)}
    assert "l2_wrap has L = 2; expected 1" in _refused(emulated, right._replace(operands=changed))


@functools.cache
def _step(device: Device, dtype: Any, layers: str | None) -> Any:
    """The model as one program, in which a device has its scratch."""
    return jax.jit(functools.partial(rwkv7.apply, dtype=dtype, layers=layers))


def _decode(
    blocks: Emulation, params: rwkv7.Params, tokens: np.ndarray, layers: str | None = "fused"
) -> tuple[np.ndarray, Any]:
    """The logits after each token of the rows [B, T], and the state after the last one."""
    dtype = params.emb.weight.dtype
    state = rwkv7.initial_state(params, len(tokens), dtype)
    step, found = _step(blocks.gpu, dtype, layers), []
    for token in tokens.T:
        logits, state = step(params, jnp.asarray(token), state)
        found.append(np.asarray(logits))
    return np.stack(found, axis=1), state


def _tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 11, (rows, 2), np.int32)


BLOCKS = [
    (256, 1, "float32", DEVICES["9.0"]),
    (320, 3, "float32", DEVICES["12.0"]),
    (384, 8, "float32", DEVICES["8.9"]),
    (256, 7, "float32", Device(1)),
    (128, 19, "float32", DEVICES["9.0"]),
    (1024, 1, "bfloat16", DEVICES["10.0"]),
    (256, 1, "float16", Device(3, 101376)),
    (256, 2, "bfloat16", DEVICES["9.0"]),
    (320, 3, "float16", Device(1)),
    (256, 8, "bfloat16", Device(3, 101376)),
    (128, 9, "float16", DEVICES["8.0"]),
    (320, 16, "bfloat16", DEVICES["12.0"]),
    (192, 31, "bfloat16", Device(5)),
    (128, 32, "float16", DEVICES["10.0"]),
]
"""Widths, rows, dtypes and devices. Few multiprocessors mean several rounds of a block of threads,
or, on matrix units, several groups of outputs for it. Little shared memory means several slices of
the inputs, or less that is under way at once."""


@pytest.mark.parametrize(("width", "rows", "dtype", "device"), BLOCKS, ids=str)
def test_blocks(blocks: Emulation, width: int, rows: int, dtype: str, device: Device) -> None:
    """Logits are close to those of the oracle, and in float32 the states to those of the model;
    seeds change nothing."""
    blocks.use(device)
    params, tokens = models.with_heads_of_64(width, dtype), _tokens(rows)
    blocks.module.seed(1)
    found, state = _decode(blocks, params, tokens)
    blocks.module.seed(2)
    assert np.array_equal(_decode(blocks, params, tokens[:, :1])[0], found[:, :1])
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(params).items()}
    oracle = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens])
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    assert tolerance.rms_error(found, oracle) < limit
    if dtype == "float32":
        _, expected = _decode(blocks, params, tokens, layers=None)
        tolerance.assert_trees_close(state, expected)


QUANTISED_BLOCKS = [
    (320, "float32", DEVICES["9.0"]),
    (256, "bfloat16", Device(1)),
    (576, "bfloat16", DEVICES["9.0"]),
    (128, "float16", Device(3, 101376)),
]


@pytest.mark.parametrize(("width", "dtype", "device"), QUANTISED_BLOCKS, ids=str)
def test_blocks_of_int8(blocks: Emulation, width: int, dtype: str, device: Device) -> None:
    """Results are those of the oracle with the matrices that those of int8 stand for."""
    blocks.use(device)
    params, tokens = all_models.quantize(models.with_heads_of_64(width, dtype)), _tokens(1)
    blocks.module.seed(1)
    found, _ = _decode(blocks, params, tokens)
    blocks.module.seed(2)
    assert np.array_equal(_decode(blocks, params, tokens)[0], found)
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(_wide(params)).items()}
    oracle = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens])
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    assert tolerance.rms_error(found, oracle) < limit


BLOCKS_BY_INPUT = [
    ("float32", False, 0, 256, DEVICES["9.0"]),
    ("bfloat16", False, 0, 1088, Device(1)),
    ("float16", False, 0, 64, Device(3, 101376)),
    ("bfloat16", False, 0.9, 320, DEVICES["9.0"]),
    ("float32", False, 1, 64, DEVICES["8.0"]),
    ("bfloat16", False, -1, 192, DEVICES["9.0"]),
    ("bfloat16", True, 0.5, 192, DEVICES["9.0"]),
    ("float16", True, 0, 256, Device(1)),
]
"""The dtype, whether weights are of int8, the share of hidden channels that are made to be zero, or
-1 where none is, widths and devices. Many multiprocessors have fewer columns each."""


@pytest.mark.parametrize(
    ("dtype", "quantised", "zeros", "width", "device"), BLOCKS_BY_INPUT, ids=str
)
def test_blocks_by_input(
    blocks: Emulation, dtype: str, quantised: bool, zeros: float, width: int, device: Device
) -> None:
    """Results are those of the oracle, and of `ffn.value` the inputs that are zero are not read."""
    blocks.use(device)
    rng = np.random.default_rng(0)
    unread = []

    def changed(block: Any) -> Any:
        key, norm = block.ffn.key.weight, block.ln2
        unread.append(rng.random(len(key)) < zeros)
        if zeros < 0:  # a constant input that all of them multiply by a positive number
            norm = norm._replace(weight=0 * norm.weight, bias=0 * norm.bias + 1)
            key = abs(key)
        key = jnp.where(unread[-1][:, None], 0, key)
        return block._replace(ln2=norm, ffn=block.ffn._replace(key=rwkv7.Weight(key)))

    params, tokens = models.with_heads_of_64(width, dtype), _tokens(1)
    params = params._replace(blocks=tuple(map(changed, params.blocks)))
    if quantised:
        params = all_models.quantize(params)
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(_wide(params)).items()}
    oracle = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens])

    def poisoned(block: Any, unread: np.ndarray) -> Any:
        value = block.ffn.value
        if not quantised:
            rows = jnp.where(unread[:, None], jnp.nan, value.by_input)
            value = value._replace(by_input=rows.astype(value.by_input.dtype))
        return block._replace(ffn=block.ffn._replace(value=value))

    params = all_models.for_decoding(params)
    params = params._replace(blocks=tuple(map(poisoned, params.blocks, unread)))
    blocks.module.seed(1)
    found, _ = _decode(blocks, params, tokens)
    blocks.module.seed(2)
    assert np.array_equal(_decode(blocks, params, tokens)[0], found)
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    assert tolerance.rms_error(found, oracle) < limit


def _wide(params: rwkv7.Params) -> rwkv7.Params:
    """The parameters with the matrices that those of int8 stand for."""
    return jax.tree.map(
        lambda x: rwkv7.Weight(x.wide()) if isinstance(x, rwkv7.Weight) else x,
        params,
        is_leaf=lambda x: isinstance(x, rwkv7.Weight),
    )


def _with_high_ranks(params: rwkv7.Params) -> rwkv7.Params:
    """The same model with low-rank maps of eight times the rank."""

    def higher(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if len(name) != 2 or name[1] not in "12":
            return x
        return jnp.tile(x, (1, 8)) if name[1] == "1" else jnp.tile(x / 8, (8, 1))

    return jax.tree_util.tree_map_with_path(higher, params)


def _with_large_mean(params: rwkv7.Params) -> rwkv7.Params:
    """Activations have a mean of 64."""
    first, *others = params.blocks
    assert first.ln0 is not None
    first = first._replace(ln0=first.ln0._replace(bias=first.ln0.bias + 64))
    return params._replace(blocks=(first, *others))


@pytest.mark.parametrize(
    ("change", "rows", "dtype"),
    [
        (_with_high_ranks, 1, "float32"),
        (_with_high_ranks, 4, "bfloat16"),
        (_with_large_mean, 1, "float32"),
    ],
)
def test_blocks_of_unusual_models(blocks: Emulation, change: Any, rows: int, dtype: str) -> None:
    """Low-rank maps that shared memory has no room for, and rows with a mean far larger than their
    deviation."""
    blocks.use(DEVICES["8.9"])
    params, tokens = change(models.with_heads_of_64(128, dtype)), _tokens(rows)
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(params).items()}
    oracle = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens])
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2}[dtype]
    assert tolerance.rms_error(_decode(blocks, params, tokens)[0], oracle) < limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_block_are_independent(
    blocks: Emulation, dtype: str, request: pytest.FixtureRequest
) -> None:
    """A row has the same bits in any batch and at any place in it, whatever the other rows are. One
    row of 16-bit elements alone does not run on matrix units: it is close. So are rows of float32
    in batches of different sizes on a GPU."""
    params = models.with_heads_of_64(256, dtype)
    rng = np.random.default_rng(0)

    def random(x: Any) -> jax.Array:
        return jnp.asarray(rng.standard_normal(x.shape), x.dtype)

    x, state = jax.tree.map(
        random, (jnp.zeros((32, 256), dtype), rwkv7.initial_state(params, 32, dtype)[1])
    )
    first = random(x)

    def run(rows: Any, state: Any = state) -> list[np.ndarray]:
        operands = jax.tree.map(lambda x: x[np.array(rows)], (x, first, state))
        found = internals.step_block(params.blocks[1], *operands)
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    together = run(range(32))
    on_gpu = request.config.getoption("--kernels-on-gpu")
    limit = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2}[dtype]
    for rows in ([5], [3, 1], [7, 2, 0, 5, 31], range(15, -1, -1), range(7, 32)):
        exact = not on_gpu if dtype == "float32" else len(rows) > 1
        for found, expected in zip(run(rows), [x[np.array(rows)] for x in together], strict=True):
            assert tolerance.rms_error(found, expected) < limit, rows
            assert not exact or np.array_equal(found, expected), rows
    broken = run(range(32), jax.tree.map(lambda x: x.at[4].set(np.nan), state))
    assert np.isnan(broken[0][4]).all()
    rest = np.arange(32) != 4
    assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(broken, together, strict=True))


def test_rows_without_a_token(blocks: Emulation) -> None:
    """Their states stay, bit by bit, and the other rows do not notice."""
    params = models.with_heads_of_64(128, "bfloat16")
    state = jax.tree.map(lambda x: x + 0.5, rwkv7.initial_state(params, 3, "bfloat16"))
    tokens, ids = jnp.array([1, 2, 3]), jnp.array([7, 0, 1])

    def step(**options: Any) -> tuple[Any, Any]:
        found = rwkv7.apply(params, tokens, state, dtype="bfloat16", layers="fused", **options)
        return jax.tree.map(np.asarray, found)

    (logits, after), (all_logits, all_after) = step(segment_ids=ids), step()
    present = np.array(ids) != 0
    assert np.array_equal(logits[present], all_logits[present])
    leaves = (*map(jax.tree.leaves, (after, all_after, state)),)
    for found, with_all, before in zip(*leaves, strict=True):
        assert np.array_equal(found[present], with_all[present])
        assert np.array_equal(found[~present], before[~present])


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_postponed_updates(blocks: Emulation, multiprocessors: int) -> None:
    """With one warp for a head and with several, a loop of any length leaves the states of a step
    at a time: those of the first block bit by bit, whose inputs no logits change. So does one in
    which rows have no token now and then, and NaN in a state stays there."""
    every = internals.MAX_PENDING + 1
    blocks.use(Device(multiprocessors))
    dtype, rows, length = "bfloat16", 5, 2 * every + 3
    params = models.with_heads_of_64(128, dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (length, rows), np.int32)
    ids = (rng.random((length, rows)) < 0.7).astype(np.int32)
    ids[:, 0] = ids[every, 1] = 1
    start = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        rwkv7.initial_state(params, rows, dtype),
    )

    @jax.jit
    def step(state: Any, token: Any, ids: Any, number: Any, last: Any) -> tuple[Any, Any]:
        state = internals.at_step(state, number, last)
        return rwkv7.apply(params, token, state, segment_ids=ids, dtype=dtype, layers="fused")

    def run(state: Any, count: int) -> tuple[list[np.ndarray], Any]:
        found = []
        for i in range(count):
            logits, state = step(state, tokens[i], ids[i], jnp.int32(i), jnp.bool(i == count - 1))
            found.append(np.asarray(logits)[ids[i] != 0])
        return found, internals.flush(state)

    limit = 1e-2
    for count in (1, 2, every + 1, every + 3, length):
        expected, expected_state = run(start, count)
        found, state = run(internals.postponed(params, start), count)
        assert tolerance.rms_error(np.concatenate(found), np.concatenate(expected)) < limit
        assert np.array_equal(state[0].att.wkv, expected_state[0].att.wkv)
        for x, y in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
            assert x.dtype == y.dtype
            assert tolerance.rms_error(np.asarray(x), np.asarray(y)) < limit
    # All bits of a NaN that CUDA makes are 1 but for the sign.
    nan = jnp.asarray(np.array([0x7FFFFFFF], np.uint32).view(np.float32))
    wkv = start[0].att.wkv.at[1, 0, 2, 3].set(nan[0])
    broken = (start[0]._replace(att=start[0].att._replace(wkv=wkv)), *start[1:])
    found, _ = run(internals.postponed(params, broken), every + 1)
    present = np.flatnonzero(ids[: every + 1, 1])
    assert all(np.isnan(found[i][1]).all() for i in present)


def _block_calls(
    monkeypatch: pytest.MonkeyPatch,
    blocks: Emulation,
    *,
    quantised: bool = False,
    by_input: bool = False,
    postponed: bool = False,
) -> list[LayerCall]:
    """The calls of the first block of a model and of the second one, in which every axis that may
    differ from the others does."""
    calls: list[LayerCall] = []

    def record(target: str, results: Any, *operands: Any, **more: Any) -> Any:
        fused = internals.fused_block(
            first="first" in target, quantised=quantised, by_input=by_input, postponed=postponed
        )
        empty = [np.zeros(shape, dtype) for shape, dtype in results]
        names = [{"x": "y"}.get(n, n if n == "v_first" else f"next {n}") for n in fused.results]
        given = dict(zip(fused.inputs, map(np.array, operands), strict=True))
        made = dict(zip([*names, "scratch"], empty, strict=True))
        if postponed:
            made |= {f"next {n}": given[n] for n in ("att.wkv", "att.wkv.waiting")}
        calls.append(LayerCall(target, given, made))
        return blocks.call(target, results, *operands, **more)

    dtype = "bfloat16" if postponed else "float32"
    params, rows = models.with_heads_of_64(128, dtype), 1 if quantised or by_input else 3
    if quantised:
        params = all_models.quantize(params)
    if by_input:
        params = all_models.for_decoding(params)
    x, state = jnp.ones((rows, 128), dtype), rwkv7.initial_state(params, rows, dtype)
    if postponed:
        state = internals.at_step(internals.postponed(params, state), jnp.int32(0), jnp.bool(False))
    with monkeypatch.context() as patch:
        internals.run_blocks_as_on_cuda(patch, blocks, record)
        for own, first, before in zip(params.blocks, (None, x), state, strict=True):
            internals.step_block(own, x, first, before)
    return calls


def test_blocks_refuse_wrong_arrays(blocks: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operand and result that is missing or has another shape or dtype is named."""
    for call in _block_calls(monkeypatch, blocks):
        for kind in ("operands", "results"):
            arrays = getattr(call, kind)
            for i, (name, x) in enumerate(arrays.items()):
                wrong = {
                    "is missing": dict(list(arrays.items())[:i]),
                    "has shape": arrays | {name: x[None]},
                    "is ": arrays | {name: x.astype(np.uint32)},
                }
                if name != "x":
                    wrong["is F16"] = arrays | {name: x.astype(np.float16)}
                for message, changed in wrong.items():
                    error = _refused(blocks, call._replace(**{kind: changed}))
                    assert f"rwkv7_block: {name} {message}" in error, error
            more = _refused(
                blocks, call._replace(**{kind: arrays | {"more": np.zeros(1, np.float32)}})
            )
            assert f"{len(arrays) + 1} {kind} given; expected {len(arrays)}" in more


def test_blocks_of_int8_refuse_wrong_arrays(
    blocks: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All matrices are of int8 or none, each with its scale."""
    call = _block_calls(monkeypatch, blocks, quantised=True)[0]

    def refused(**changes: np.ndarray) -> str:
        operands = {n: changes.get(n.replace(".", "_"), x) for n, x in call.operands.items()}
        return _refused(blocks, call._replace(operands=operands))

    weight, scale = call.operands["ffn.key.weight"], call.operands["ffn.key.scale"]
    for message, error in {
        "ffn.key.weight is F32; expected S8": refused(ffn_key_weight=weight.astype(np.float32)),
        "ffn.key.scale is F16; expected F32": refused(ffn_key_scale=scale.astype(np.float16)),
        "ffn.key.scale has shape [511]": refused(ffn_key_scale=scale[1:]),
    }.items():
        assert f"rwkv7_block: {message}" in error, error
    (wide,) = _block_calls(monkeypatch, blocks)[:1]
    operands = wide.operands | {"ffn.key.weight": weight}
    error = _refused(blocks, wide._replace(operands=operands))
    assert "ffn.key.weight is S8; expected no S8 where att.receptance.weight is not" in error


def test_blocks_by_input_refuse_wrong_arrays(
    blocks: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _block_calls(monkeypatch, blocks, by_input=True)[0]
    value = call.operands["ffn.value.by_input"]
    for message, x in {
        "ffn.value.by_input has shape [128, 512], so F = 128, where ffn.key": value.T.copy(),
        "ffn.value.by_input is S8; expected no S8 where att.rec": value.astype(np.int8),
    }.items():
        error = _refused(blocks, call._replace(operands=call.operands | {"ffn.value.by_input": x}))
        assert f"rwkv7_block: {message}" in error, error
    two = {n: np.repeat(x, 2, 0) if len(x) == 1 else x for n, x in call.operands.items()}
    results = {n: np.repeat(x, 2, 0) if len(x) == 1 else x for n, x in call.results.items()}
    error = _refused(blocks, call._replace(operands=two, results=results))
    assert "x has B = 2 where ffn.value is by input; expected 1 row" in error, error


def test_postponed_blocks_refuse_wrong_arrays(
    blocks: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = _block_calls(monkeypatch, blocks, postponed=True)[1]

    def refused(name: str, x: np.ndarray, *, in_place: bool = True) -> str:
        result = {f"next {name}": x} if in_place else {}
        results = call.results | {n: x for n, x in result.items() if n in call.results}
        return _refused(blocks, call._replace(operands=call.operands | {name: x}, results=results))

    waiting, schedule = (call.operands[f"att.wkv.{n}"] for n in ("waiting", "schedule"))
    tokens, fewer = (np.ascontiguousarray(x) for x in (waiting[:, :, :2], waiting[:, :, :, :4]))
    for message, error in {
        "att.wkv.waiting has N = 2 and U = 5": refused("att.wkv.waiting", tokens),
        "att.wkv.waiting has N = 5 and U = 4": refused("att.wkv.waiting", fewer),
        "and att.wkv.schedule has P = 1; exp": refused("att.wkv.schedule", schedule[:1]),
        "att.wkv and att.wkv.waiting lie elsewhere": refused(
            "att.wkv.waiting", waiting.copy(), in_place=False
        ),
    }.items():
        assert message in error, error
    wide = {
        n: x.astype(np.float32) if x.dtype == jnp.bfloat16 else x for n, x in call.operands.items()
    }
    results = {n: x.astype(np.float32) for n, x in call.results.items()}
    results |= {f"next {n}": wide[n] for n in ("att.wkv", "att.wkv.waiting")}
    error = _refused(blocks, call._replace(operands=wide, results=results))
    assert "x has B = 3 where tokens wait; expected several rows of BF16" in error, error


def test_blocks_refuse_sizes(blocks: Emulation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which Python refuses before."""
    call = _block_calls(monkeypatch, blocks)[0]

    own = internals.fused_block(first=True, quantised=True)
    results = {f"next {n}": axes for n, axes in own.results.items()}
    axes: dict[str, str] = {**own.inputs, **results, "y": "BC", "v_first": "BC", "scratch": "X"}

    def resized(call: LayerCall, sizes: dict[str, int]) -> str:
        def zeros(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            def shape(name: str, x: np.ndarray) -> list[int]:
                letters = zip(axes[name], x.shape, strict=True)
                return [sizes.get(a) or size for a, size in letters]

            return {name: np.zeros(shape(name, x), x.dtype) for name, x in arrays.items()}

        operands, of_results = zeros(call.operands), zeros(call.results)
        return _refused(blocks, call._replace(operands=operands, results=of_results))

    for sizes, message in (
        ({"B": 33}, "x has B = 33; expected up to 32 rows"),
        ({"K": 32}, "att.wkv has V = 64 and K = 32; expected 64"),
        ({"H": 3}, "x has C = 128 where att.wkv has H = 3; expected C = H K > 0"),
        ({"F": 480}, "ffn.key.weight has F = 480; expected a multiple of 64"),
        ({"W": 12}, "att.w1 has a rank of 12; expected a multiple of 8 up to 1024"),
        ({"G": 1032}, "att.g1 has a rank of 1032; expected a multiple of 8 up to 1024"),
        ({"X": 7}, "scratch has X = 7; expected "),
    ):
        assert f"rwkv7_block: {message}" in resized(call, sizes), sizes
    call = _block_calls(monkeypatch, blocks, quantised=True)[0]
    message = "x has B = 2 where att.receptance.weight is S8; expected 1 row"
    assert f"rwkv7_block: {message}" in resized(call, {"B": 2})
