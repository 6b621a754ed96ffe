"""The commands of `python -m rwkv_jax`."""

import shlex
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rwkv_jax import _commands, models
from support import checkpoints


@pytest.mark.parametrize("name", _commands.COMMANDS)
def test_help_and_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The help text of a command has examples, all of which are accepted."""
    examples = _commands.COMMANDS[name].EXAMPLES
    with pytest.raises(SystemExit) as end:
        _commands.main([name, "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert examples
    for line in examples:
        assert f"  rwkv-jax {line}\n" in text
        assert _commands.parser().parse_args(shlex.split(line)).command == name


def test_help_of_the_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rwkv_jax", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: rwkv-jax")
    assert all(f"    {name}" in done.stdout for name in _commands.COMMANDS)
    assert not done.stderr


def test_errors_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "model.pth"
    assert _commands.main(["inspect", str(missing)]) == 2
    assert capsys.readouterr().err == f"rwkv-jax inspect: {missing}: No such file or directory\n"
    assert _commands.main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"rwkv-jax inspect: {tmp_path}: the folder has no")


def test_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "inspect", interrupted)
    assert _commands.main(["inspect", "model.pth"]) == 130


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = checkpoints.rwkv7(dtype="bfloat16")
    path = tmp_path / "model.safetensors"
    checkpoints.write_safetensors(path, tensors)
    found, loaded = models.inspect(path), models.load(path)
    assert found.config == loaded.config
    assert found.files == loaded.files == (str(path),)
    for x, y in zip(jax.tree.leaves(found.params), jax.tree.leaves(loaded.params), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    assert _commands.main(["inspect", str(path), "--batch", "3", "--dtype", "float32"]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    rows = {name: value.strip() for name, value in rows.items()}
    count = sum(x.size for x in jax.tree.leaves(found.params))
    assert rows["generation"] == "RWKV-7"
    assert rows["width"] == "24"
    assert rows["rank of w"] == "7"
    assert rows["hidden"] == "96"
    assert rows["tokenizer"] == "not known from the size of the vocabulary"
    assert rows["parameters"] == f"{count:,}"
    assert rows["dtype"] == "bfloat16"
    assert rows["weights"] == f"{4 * count / 1000:.3g} kB in float32"
    state = 2 * 3 * (24 + 24 + 3 * 8 * 8)
    assert rows["states"] == f"{4 * state / 1000:.3g} kB for 3 rows, activations in float32"
    assert np.isclose(float(rows["files"].split()[0]), path.stat().st_size / 1000, rtol=5e-3)
