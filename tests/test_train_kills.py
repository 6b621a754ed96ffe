"""A run of training that is killed many times ends as one that is not."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support import kills


@pytest.mark.slow
def test_killed_runs_resume_exactly(tmp_path: Path) -> None:
    """Ten times, at random steps and at all stages of writing a checkpoint."""
    text, whole, parts = (tmp_path / name for name in ("text", "whole", "parts"))
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 50)
    given = {"layers": 1, "width": 16, "head-size": 16, "steps": 24, "batch": 2, "context": 16}
    given |= {"eval-tokens": 48, "eval-every": 8, "save-every": 2, "sample": 4, "ema": 0.9}
    given |= {"data": text, "cache": tmp_path / "cache"}
    options = ["--best", *(f"--{name}={x}" for name, x in given.items())]

    def run(out: Path, *when: Any) -> int:
        resume = ["--resume"] if [*out.glob("checkpoint.*")] else []
        return kills.start([*options, f"--out={out}", *resume], *when)

    rng = np.random.default_rng(0)
    ways = [*kills.WHEN, "step", "step", "writing", "writing", "writing"]
    for when in rng.permutation(ways):
        delay = rng.integers(4) if when == "step" else rng.uniform(0, 0.15)
        assert run(parts, str(when), float(delay)) == -signal.SIGKILL
    assert run(parts) == run(whole) == 0
    for name in ("model.safetensors", "ema.safetensors", "log.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert metrics(parts) == metrics(whole)


def metrics(out: Path) -> list[dict[str, float]]:
    """All that do not depend on time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    times = {"seconds", "tokens_per_second"}
    return [{name: x for name, x in line.items() if name not in times} for line in lines]
