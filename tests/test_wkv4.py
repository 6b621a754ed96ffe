"""WKV4: resets of the state, and plain XLA as it runs on other platforms than CPUs."""

from typing import Any

import jax
import numpy as np
import pytest

from support import internals
from support.cases import Case
from support.harness import assert_right, check, expected, operands, value_and_gradients
from support.operators import Run, available

pytestmark = pytest.mark.quick("implementation")

IDS = np.array([[0] * 3 + [4] * 6 + [0] * 8 + [4, 5, 6] * 3 + [0] * 2 + [9] * 45])

CASES: list[Any] = [
    (Case(1, IDS.shape[1], 1, 16, decay="log", regime="mixed"), {"segment_ids": IDS}),
    (Case(2, 134, 1, 16, decay="log", regime="extreme", state=False), {}),
]
RESETS = Case(2, 67, 1, 16, decay="log")


@pytest.mark.parametrize("implementation", available("wkv4", RESETS))
def test_a_log_decay_of_minus_infinity(implementation: str) -> None:
    """Each token forgets all before it, as with any decay whose factor is 0."""
    run = Run("wkv4", implementation)
    inputs, cotangents = operands(run.op, RESETS)
    w = {x: np.where(np.arange(16) % 3, inputs["w"], np.float32(x)) for x in (-np.inf, -1e30)}
    found = value_and_gradients(run, inputs | {"w": w[-np.inf]}, cotangents, decay="log")
    assert_right(found, expected(run.op, inputs | {"w": w[-1e30]}, cotangents, decay="log"))


@pytest.mark.slow
@pytest.mark.parametrize(("case", "options"), CASES, ids=["segments", "rows"])
def test_walks_without_loops(
    monkeypatch: pytest.MonkeyPatch, case: Case, options: dict[str, Any]
) -> None:
    """Several chunks of several groups, the last one of few tokens."""
    internals.unroll_wkv4(monkeypatch)
    check(Run("wkv4", "xla"), case, **options)


@pytest.mark.slow
def test_sequences_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rows of several chunks, with two empty sequences each, and in one of them with tokens
    of no sequence."""
    internals.unroll_wkv4(monkeypatch)
    run, case = Run("wkv4", "xla"), Case(1, 134, 1, 16)
    rows = np.array([[5, 5, 9, 66, 66, 130], [0, 64, 64, 65, 65, 134]], np.int32)
    inputs, cotangents = operands(run.op, case, cu_seqlens=rows[0])
    found = jax.vmap(lambda cu: value_and_gradients(run, inputs, cotangents, cu_seqlens=cu))(rows)
    for i, cu in enumerate(rows):
        own = {name: x[i] for name, x in found.items()}
        assert_right(own, expected(run.op, inputs, cotangents, cu_seqlens=cu))
