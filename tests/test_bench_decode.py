"""The benchmarks of decoding and of its products: their tables, and the floor of a row."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"

TINY = ["--vocabulary=256", "--tokens=2", "--repeats=1", "--one-process"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_decode")
    monkeypatch.setattr(script.decoding, "copy_gb_s", lambda clock: 10.0)
    return script


def test_table(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    given = ["--rows=1x64x3xfloat32", "--prefill=16", "--pause=0.01", "--profile", f"--json={file}"]
    assert script.main([*TINY, *given]) == 0
    output = capsys.readouterr().out
    for words in ("1x64, batch 3, float32, decoding", "prefill", "times floor", "one token"):
        assert words in output
    decoding, prefill = json.loads(file.read_text())["rows"]
    assert decoding["tokens_per_second"] == pytest.approx(3e3 / decoding["ms"])
    matrices = 12 * 64 * 64 + 3 * 2 * 64 * 32
    vectors = 64 * (19 - 1 + 2 + 2)
    states = 3 * (64 * 64 + 2 * 64)
    moved = 4 * (matrices + vectors + 256 * 64 + 3 * 64 + 2 * states)
    assert decoding["bytes"] == moved
    assert decoding["floor_ms"] == pytest.approx(moved / 1e7)
    assert decoding["times_floor"] == pytest.approx(decoding["ms"] / decoding["floor_ms"])
    assert decoding["profile"]["classes"]["products"]["ms"] > 0
    flops = prefill["share_of_peak"] * 989e12 * prefill["ms"] / 1e3
    assert flops == pytest.approx(16 * (2 * matrices + 8 * 64 * 64))


def test_zeros(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Weights have the share of zeros that is asked for, and the floor counts what is left."""
    file = tmp_path / "figures.json"
    picture = tmp_path / "decode.png"
    given = ["--rows=1x64x2xfloat32", "--zeros", "0", "75", "100", f"--json={file}"]
    assert script.main([*TINY, *given, f"--plot={picture}"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert "weights are made so that" in output
    assert "1x64, batch 2, float32, 75 % zeros, decoding" in output
    moved = [row["bytes"] for row in json.loads(file.read_text())["rows"]]
    value = 4 * 64 * 256
    assert [moved[0] - x for x in moved] == [0, value * 0.75**2, value]
    settings = script.Settings(vocabulary=256, dtype="float32")
    for share in (0.0, 0.75, 1.0):
        row = script.Row(1, 64, 1, "float32", share)
        ffn = script.decoding.parameters(row, settings).blocks[0].ffn
        tokens = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
        tokens -= tokens.mean(1, keepdims=True)
        hidden = (tokens / tokens.std(1, keepdims=True) + 1) @ np.asarray(ffn.key.weight).T
        assert np.mean(hidden <= 0) == pytest.approx(share, abs=0.03)


def test_failure_is_a_line_of_the_table(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*TINY, "--rows=2x65x1"]) == 1
    assert "failed: ValueError: rwkv7: width is 65" in capsys.readouterr().out


def test_fused_blocks_are_for_few_rows(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*TINY, "--rows=1x64x9", "--fused"]) == 1
    assert "rwkv7_block: implementation 'fused' cannot run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["--rows=2x64", "--rows=2x64x1xint3", "--tokens=0", "--zeros=101", "--invariant=0"]
)
def test_bad_option(script: ModuleType, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([*TINY, option])
    assert option.lstrip("-").partition("=")[0] in capsys.readouterr().err


def test_rows_of_a_product(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_row_product")
    monkeypatch.setattr(script, "BYTES", 2**10)
    given = ["--matrices=24x16", "--weights=int8", "--rows", "1", "3", "--repeats=1"]
    assert script.main(given) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split("|")[1].strip() for line in lines] == ["24x16, int8, 1", "24x16, int8, 3"]
    assert all(float(line.split("|")[4]) > 0 for line in lines)
