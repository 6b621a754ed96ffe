"""`scripts/compare_models.py`."""

import pytest

from support import scripts


@pytest.mark.slow
def test_errors_are_small(capsys: pytest.CaptureFixture[str]) -> None:
    main = scripts.load("compare_models").main
    assert main(["--versions", "RWKV-4", "--tokens", "4", "--vocabulary", "30"]) == 0
    assert "| RWKV-4   |   42/42 |" in capsys.readouterr().out
