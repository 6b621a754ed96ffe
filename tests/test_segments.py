"""`segment_ids`: several segments in a row, each as if it were alone."""

import functools
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies

from support.cases import Case
from support.harness import check, operands, value_and_gradients
from support.operators import FAST, SEQUENCES, Run, available

pytestmark = pytest.mark.quick("run", "op", "case.dtype")

IDS = {
    "one": [3] * 70,
    "several": [1] * 5 + [2] * 30 + [1] * 1 + [7] * 34,
    "short": [1, 2, 3, 3, 4, 5, 5, 5] + [6, 7] * 20 + [8] * 22,
    "at boundaries": [1] * 16 + [2] * 48 + [3] * 6,
    "padding": [0] * 3 + [4] * 20 + [0] * 10 + [4] * 18 + [0] * 2 + [9] * 10 + [0] * 7,
    "padding alone": [0] * 70,
}
ROWS = np.array(list(IDS.values()), np.int32)


CASES = (
    Case(len(IDS), 70, 2, 64),
    Case(len(IDS), 70, 2, 64, dtype="bfloat16"),
    Case(len(IDS), 70, 1, 64, dtype="float16", decay="exp", regime="mixed", state=False),
)
"""Rows of 70 tokens: a whole chunk, and one that the tokens do not fill."""

QUICK = (*((op, "ffi") for op in SEQUENCES), ("wkv7", "reference"))

RUNS = [
    pytest.param(
        *(Run(op, implementation), case),
        # All references take one token after another; that of WKV7 shows enough.
        marks=[pytest.mark.slow] * ((op, implementation) not in QUICK),
        id=f"{op}-{implementation}-{case.dtype}",
    )
    for op, own in SEQUENCES.items()
    for case in map(own.suited, CASES)
    for implementation in available(op, case, segment_ids=ROWS)
    if implementation == "ffi" or (case.dtype == "float32" and op in ("wkv7", "wkv6", "wkv4"))
]
"""The implementations of WKV5 other than the native kernels are the ones of WKV6."""


def _check(run: Run, case: Case, ids: np.ndarray) -> None:
    precision = "highest" if case.dtype == "float32" else None
    found = check(run, case, precision=precision, segment_ids=ids)
    for name in ("y", *(f"d{n}" for n in run.operator.timed)):
        assert not np.asarray(found[name])[ids == 0].any(), name


@pytest.mark.parametrize(("run", "case"), RUNS)
def test_segments_are_as_if_alone(run: Run, case: Case) -> None:
    _check(run, case, ROWS)


SIZES = (
    Case(1, 0, 2, 64),
    Case(0, 17, 2, 64),
    Case(3, 1, 2, 16),
    Case(3, 200, 1, 16, dtype="float16"),
    Case(3, 130, 1, 32, decay="log"),
    Case(2, 33, 2, 128, state=False),
    Case(2, 17, 1, 256, dtype="bfloat16"),
    Case(1, 70, 1, 7),
)


def _native(several: tuple[Case, ...]) -> list[Any]:
    """Native kernels that can run these cases; no shape takes them long to compile."""
    return [
        pytest.param(Run(op, "ffi"), case, id=f"{op}-{case}")
        for op, own in SEQUENCES.items()
        for case in map(own.suited, several)
        if "ffi" in available(op, case, segment_ids=np.ones((case.B, case.T), np.int32))
    ]


@pytest.mark.parametrize(("run", "case"), _native(SIZES))
def test_rows_of_any_size(run: Run, case: Case) -> None:
    """Segments of any length, and a chunk that is padding alone."""
    rng = np.random.default_rng(case.T)
    ids = np.zeros((case.B, case.T), np.int32)
    for row in ids:
        cuts = np.sort(rng.integers(0, case.T + 1, max(3, case.T // 20)))
        for i, segment in enumerate(np.split(row, cuts)):
            segment[:] = i * (rng.random() < 0.7)
    if case.T > 128:
        ids[0, 64:128] = 0
    _check(run, case, ids)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(("run", "case"), _native((Case(2, 150, 1, 32),)))
def test_what_is_not_finite_stays_in_its_segment(run: Run, case: Case, value: float) -> None:
    ids = np.repeat(np.array([[1, 2, 0, 3], [1, 2, 3, 0]], np.int32), [20, 50, 10, 70], axis=1)
    inputs, cotangents = operands(run.op, case)
    call = functools.partial(value_and_gradients, run, decay=case.decay, segment_ids=ids)
    right = jax.device_get(call(inputs, cotangents))
    timed = run.operator.timed
    for x in (*(inputs[name] for name in timed), cotangents["dy"]):
        x[ids == 2] = value
    found = jax.device_get(call(inputs, cotangents))
    assert not np.isfinite(found["y"][ids == 2]).all()
    for name in right.keys() - {f"d{n}" for n in run.operator.shared}:
        x, y = found[name], right[name]
        if name == "y" or name[1:] in timed:
            x, y = x[ids != 2], y[ids != 2]
        np.testing.assert_array_equal(x, y, err_msg=name)


CASE = Case(2, 70, 1, 16)

several_ids = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([0, 0, 1, 2, 3, -1]),
        strategies.sampled_from([1, 1, 2, 5, 16, 30, 48, 64]),
    ),
    max_size=12,
)


def _row(several: list[tuple[int, int]]) -> list[int]:
    """Each id so many times: ids that come again, next to each other or not, then padding."""
    ids = [one for one, times in several for _ in range(times)]
    return (ids + [0] * CASE.T)[: CASE.T]


@pytest.mark.parametrize("run", FAST.values(), ids=FAST)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
@hypothesis.given(rows=strategies.tuples(several_ids.map(_row), several_ids.map(_row)))
def test_any_ids(run: Run, rows: tuple[list[int], ...]) -> None:
    check(run, CASE, segment_ids=np.array(rows, np.int32))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_any_integers(dtype: str) -> None:
    run, ids = FAST["wkv7"], ROWS[[1, 4]]
    inputs, _ = operands(run.op, CASE)
    found, right = (run(**inputs, segment_ids=x)[0] for x in (ids.astype(dtype), ids))
    np.testing.assert_array_equal(found, right)
