"""WKV4 in plain XLA as it runs on other platforms than CPUs."""

import numpy as np
import pytest

from support import internals
from support.cases import Case
from support.harness import check
from support.operators import Run

IDS = np.array([[0] * 3 + [4] * 6 + [0] * 8 + [4, 5, 6] * 3 + [0] * 2 + [9] * 45])


@pytest.mark.slow
def test_walks_without_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of several groups, the last one of few tokens, with segments."""
    internals.unroll_wkv4(monkeypatch)
    case = Case(1, IDS.shape[1], 1, 16, decay="log", regime="mixed")
    check(Run("wkv4", "xla"), case, segment_ids=IDS)
