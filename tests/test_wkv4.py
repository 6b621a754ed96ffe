"""WKV4 in plain XLA as it runs on other platforms than CPUs."""

import numpy as np
import pytest

from support import internals
from support.cases import Case
from support.harness import check
from support.operators import Run

IDS = np.array([[0] * 3 + [4] * 6 + [0] * 8 + [4, 5, 6] * 3 + [0] * 2 + [9] * 45])


CASES = [
    pytest.param(Case(1, IDS.shape[1], 1, 16, decay="log", regime="mixed"), IDS, id="segments"),
    pytest.param(Case(2, 200, 1, 16, decay="log", regime="extreme", state=False), None, id="rows"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ids"), CASES)
def test_walks_without_loops(
    monkeypatch: pytest.MonkeyPatch, case: Case, ids: np.ndarray | None
) -> None:
    """Several chunks of several groups, the last one of few tokens."""
    internals.unroll_wkv4(monkeypatch)
    check(Run("wkv4", "xla"), case, segment_ids=ids)
