"""The benchmark of the loss: its table."""

import importlib
import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_loss")
    file = tmp_path / "figures.json"
    assert script.main(["--shapes=8x16x32", "--slabs=4", "--repeats=1", f"--json={file}"]) == 0
    assert "8x16x32, forward+backward" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    names = ("all logits", "cross_entropy", "cross_entropy, recompute", "slabs of 4")
    assert [row["contestant"] for row in rows] == [*names, *names]
    assert all(row["differs"] < 1e-5 for row in rows)
