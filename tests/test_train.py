"""`scripts/train.py`: it learns, and an interrupted run resumes as if it had not been."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
TEXT = b"the quick brown fox jumps over the lazy dog\n" * 200
STEPS, INTERRUPTED_AT = 8, 5


@pytest.fixture
def train() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("train", SCRIPTS / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The strictness that tests ask of the package is not asked of optax and flax.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield module


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    (tmp_path / "text").write_bytes(TEXT)
    given = {"layers": 1, "width": 32, "head-size": 16, "steps": STEPS, "batch": 2, "context": 16}
    given |= {"eval-every": 3, "eval-bytes": 64, "save-every": 2, "sample": 8, "warmup": 2}
    return [f"--data={tmp_path / 'text'}", *(f"--{name}={x}" for name, x in given.items())]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    where = json.loads((folder / "checkpoint.json").read_text())["arrays"]
    with ocp.StandardCheckpointer() as checkpointer:
        return jax.tree.map(np.asarray, checkpointer.restore((folder / where).absolute()))


def test_interrupted_run_resumes_exactly(
    train: ModuleType,
    options: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train.main([*options, f"--out={whole}"]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in ("unigram", "bigram", "RWKV-7", "sample"))
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")

    batch_at = train.batch_at

    def interrupting(step: int, *rest):
        if step == INTERRUPTED_AT - 1:
            signal.raise_signal(signal.SIGINT)
        return batch_at(step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(train, "batch_at", interrupting)
        assert train.main([*options, f"--out={parts}"]) == 130
    assert f"after step {INTERRUPTED_AT};" in capsys.readouterr().out
    assert not (parts / "log.json").exists()

    assert train.main([*options, f"--out={parts}", "--resume"]) == 0
    log, expected = (json.loads((out / "log.json").read_text()) for out in (parts, whole))
    assert log == expected
    assert len(log["train"]) == STEPS
    assert [step for step, _ in log["held_out"]] == [3, 6, STEPS]
    assert log["train"][-1] < log["train"][0] - 1
    results, others = arrays(parts), arrays(whole)
    assert set(results) == set(others)
    assert all(np.array_equal(results[name], others[name]) for name in results)
    assert "model.blocks.0.att.receptance.weight" in results

    with pytest.raises(SystemExit, match="was made with batch 2, not 4"):
        train.main([*options, f"--out={parts}", "--resume", "--batch=4"])


def test_resume_needs_a_checkpoint(train: ModuleType, options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="does not exist"):
        train.main([*options, f"--out={tmp_path}", "--resume"])


def test_help_needs_no_data() -> None:
    command = [sys.executable, SCRIPTS / "train.py", "--help"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    for option in ("--size", "--data", "--steps", "--dtype", "--implementation", "--resume"):
        assert option in shown.stdout


def test_every_twentieth_file_is_held_out(train: ModuleType, tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"{i:02}.py").write_text(f"<{i}>")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "no.py").write_text("not ours")
    (tmp_path / "no.txt").write_text("not ours")
    text, held_out = train.read(tmp_path, "*.py")
    assert bytes(held_out) == b"<19>\n<39>"
    assert bytes(text) == "\n".join(f"<{i}>" for i in range(40) if i % 20 != 19).encode()


def test_standard_library_is_the_default(train: ModuleType) -> None:
    text, held_out = train.read(None, "*.py")
    assert len(text) > 10 * len(held_out) > 1_000_000
    assert b"class OrderedDict" in bytes(text) + bytes(held_out)


def test_ngrams_know_what_they_counted(train: ModuleType) -> None:
    text = np.frombuffer(b"ab" * 5000, np.uint8)
    losses = train.ngram_losses(text, text[None, :101])
    assert losses["unigram"] == pytest.approx(np.log(2), abs=0.05)
    assert losses["bigram"] == pytest.approx(0, abs=0.01)
