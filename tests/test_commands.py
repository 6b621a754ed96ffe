"""The commands of `python -m rwkv_jax`."""

import functools
import io
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import numpy as np
import pytest

import rwkv_jax
from rwkv_jax import _commands, evaluation, models, tokenizers
from rwkv_jax._commands import doctor
from support import checkpoints
from support.commands import Command
from support.disks import files_up_to
from support.vocabularies import write_vocabulary


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help text of each command has examples, all of which are accepted."""
    with pytest.raises(SystemExit, match=r"^0$"):
        _commands.main(["--help"])
    text = capsys.readouterr().out
    assert text.startswith("usage: rwkv-jax")
    for name, module in _commands.COMMANDS.items():
        assert f"    {name}" in text
        with pytest.raises(SystemExit, match=r"^0$"):
            _commands.main([name, "--help"])
        examples = re.findall(r"^  rwkv-jax (.*)$", capsys.readouterr().out, re.MULTILINE)
        assert examples == list(module.EXAMPLES) != []
        for line in examples:
            assert _commands.parser().parse_args(shlex.split(line)).command == name


def test_errors_of_the_user(tmp_path: Path, command: Command) -> None:
    for path, message in (
        (tmp_path / "model.pth", "No such file or directory\n"),
        (tmp_path, "the folder has no"),
    ):
        assert command.refused("inspect", path).startswith(f"rwkv-jax inspect: {path}: {message}")


def test_paths_that_are_none(tmp_path: Path, command: Command) -> None:
    model = checkpoints.write_model(tmp_path)
    assert "the path is empty; accepted" in command.refused("inspect", "")
    nobody = "~nobody-has-this-name/x.pth"
    assert command.refused("convert", model, nobody).startswith(f"rwkv-jax convert: {nobody}: ")


def test_a_closed_output() -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m rwkv_jax doctor >&-"], capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_closed_pipe(tmp_path: Path) -> None:
    """Nothing is said of it, as of other programs before head, by the module as a program."""
    model = checkpoints.write_model(tmp_path)
    command = f"{sys.executable} -m rwkv_jax inspect {model} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_characters_that_a_terminal_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    path, target = checkpoints.write_model(tmp_path), tmp_path / "界.safetensors"
    assert _commands.main(["convert", str(path), str(target)]) == 0
    assert rb"/\u754c.safetensors: RWKV-7" in shown.buffer.getvalue()


def test_files_in_the_place_of_another(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are named, whatever reads them; and a path may begin with ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for content, message in (
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "a pointer of Git LFS"),
        (b"GGUF\3\0\0\0" + bytes(100), "of GGUF, the format of llama.cpp"),
        (b"\n<!DOCTYPE html>\n<html>404", "an HTML page"),
    ):
        for name in ("model.pth", "model.safetensors", "model.safetensors.index.json"):
            (tmp_path / name).write_bytes(content)
            error = command.refused("inspect", f"~/{name}")
            assert f"{tmp_path / name}: the file is {message}" in error
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(ValueError, match=f"the file is {message}"):
            tokenizers.load("~/tokenizer.json")


def test_interrupt(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "inspect", Mock(side_effect=KeyboardInterrupt))
    command("inspect", "model.pth", code=130)


def test_doctor(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Right operators pass. One with a wrong gradient, one that gives NaN and one that raises fail
    by name, and so does the command, also where there is no device."""
    devices, kept = jax.local_devices(), functools.cache(doctor._results)

    def wrong(op: str, implementation: str, *others: Any) -> dict[str, np.ndarray]:
        arrays = kept(op, implementation, *others)
        if implementation == "reference" or op == "wkv7":
            return arrays
        if op == "wkv4":
            raise RuntimeError("out of order")
        return arrays | {"gradient v": arrays["gradient v"] * (1.01 if op == "wkv5" else np.nan)}

    monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices[:1])
    monkeypatch.setattr(doctor, "_results", kept)
    text = command("doctor").out
    assert f"rwkv-jax  {rwkv_jax.__version__}".split() in [x.split() for x in text.splitlines()]
    assert len(re.findall(r"  passed$", text, re.MULTILINE)) == 6
    monkeypatch.setattr(doctor, "_results", wrong)
    text = command("doctor", code=1).out
    assert len(re.findall(r"  FAILED$", text, re.MULTILINE)) == 5
    assert f"{devices[0]} wkv4: RuntimeError: out of order" in text
    report = json.loads(command("doctor", "--json", code=1).out)
    assert report["packages"]["jax"] == jax.__version__
    assert report["build"]["missing"] == rwkv_jax.build_info()["missing"]
    assert report["devices"] == [{"device": str(devices[0]), "kind": devices[0].device_kind}]
    rows = {(x["operator"], x["implementation"]): x for x in report["implementations"]}
    assert rows["wkv7", "xla"]["runs"]
    checks = {x["operator"]: x for x in report["checks"]}
    assert {op: x["passed"] for op, x in checks.items()} == {op: op == "wkv7" for op in checks}
    assert all(rows[op, x["implementation"]]["default"] for op, x in checks.items())
    assert checks["wkv5"]["error"] == pytest.approx(0.01, rel=1e-2)
    assert checks["wkv5"]["array"] == checks["wkv6"]["array"] == "gradient v"

    monkeypatch.setattr(jax, "local_devices", Mock(side_effect=RuntimeError("no driver")))
    assert command("doctor", code=1).out.endswith("\n\nno driver\n")
    report = json.loads(command("doctor", "--json", code=1).out)
    assert report["device_error"] == "no driver"


def test_inspect(tmp_path: Path, command: Command) -> None:
    path = checkpoints.write_model(tmp_path, dtype="bfloat16")
    found, loaded = models.inspect(path), models.load(path)
    assert found.config == loaded.config
    assert found.files == loaded.files == (str(path),)
    for x, y in zip(jax.tree.leaves(found.params), jax.tree.leaves(loaded.params), strict=True):
        assert isinstance(x, jax.ShapeDtypeStruct)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
    rows = command.table("inspect", path, "--batch", 3, "--dtype", "float32")
    count = sum(x.size for x in jax.tree.leaves(found.params))
    state = 2 * 3 * (24 + 24 + 3 * 8 * 8)
    expected = {
        "generation": "RWKV-7",
        "hidden size": "24",
        "rank of w": "7",
        "ffn size": "96",
        "tokenizer": "not known from the size of the vocabulary",
        "parameters": f"{count:,}",
        "dtype": "bfloat16",
        "weights": f"{4 * count / 1000:.3g} kB in float32",
        "states": f"{4 * state / 1000:.3g} kB for 3 rows, activations in float32",
    }
    assert rows.items() >= expected.items()
    assert np.isclose(float(rows["files"].split()[0]), path.stat().st_size / 1000, rtol=5e-3)


def test_convert(tmp_path: Path, command: Command) -> None:
    """From form to form and back, bit for bit; and to another dtype."""
    first = checkpoints.write_model(tmp_path, heads=1, head_size=64)
    names = ("model.pth", "fla", "hf", "last.safetensors")
    archive, fla, hugging_face, last = (tmp_path / x for x in names)
    fla.mkdir()
    for source, target, *more in (
        (first, archive),
        (archive, fla, "--names", "fla"),
        (fla, hugging_face, "--names", "hf"),
        (hugging_face, last),
    ):
        done = command("convert", source, target, *more).out
        assert done == f"{target}: RWKV-7, 111,424 parameters, 446 kB\n"
        error = command.refused("convert", source, target, *more)
        assert error == f"rwkv-jax convert: {target} exists; --force replaces it\n"
        if target == fla:
            for name in ("tokenizer.json", "chat_template.jinja", "notes.txt"):
                (fla / name).write_text(name)
    found = {x.name: x.read_bytes() for x in hugging_face.iterdir()}
    assert found.keys() == {
        *("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    }
    assert found["tokenizer.json"] == b"tokenizer.json"
    command("convert", hugging_face, hugging_face, "--names", "hf", "--force")
    expected, found = (jax.tree.leaves(models.load(path).params) for path in (first, last))
    for x, y in zip(expected, found, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)
    full = tmp_path / "full"
    with files_up_to(2**18):
        error = command.refused("convert", first, full, "--names", "hf")
    assert error == f"rwkv-jax convert: {full}/model.safetensors: File too large\n"
    assert not list(full.iterdir())
    command("convert", first, last, "--force", "--dtype", "bfloat16")
    assert models.inspect(last).params.emb.weight.dtype == "bfloat16"


def test_average(tmp_path: Path, command: Command) -> None:
    """Of states, which are those of a model of the same sizes."""
    model = checkpoints.write_model(tmp_path)
    paths = {tmp_path / "a.pth": 1.0, tmp_path / "b.pth": 5.0}
    names = [f"blocks.{i}.att.time_state" for i in range(2)]
    for path, value in paths.items():
        checkpoints.write_pth(path, {x: np.full((3, 8, 8), value, np.float32) for x in names})
    (first, second), mean = paths, tmp_path / "mean.pth"
    assert command("average", mean, f"{first}=3", second).out == f"{mean}: 2 states of 2 files\n"
    for block in models.load_state(mean, models.inspect(model).params):
        np.testing.assert_array_equal(block.att.wkv, np.full((1, 3, 8, 8), 2.0))
    other = tmp_path / "other.pth"
    assert "model.safetensors: the file has no tuned" in command.refused("average", other, model)
    assert f"{first}=x, whose weight is 'x'" in command.refused("average", other, f"{first}=x")
    assert "--force replaces it" in command.refused("average", mean, first)


# With a model that is not there for those that load it first.
TARGETS = {
    "--save-state": ["generate", "no.pth", "--prompt", "x", "--save-state"],
    "--session": ["chat", "no.pth", "--session"],
    "--plot": ["eval", "no.pth", "--text", "no.txt", "--plot"],
    "TARGET": ["convert", "model.safetensors"],
    "OUT": ["merge", "model.safetensors", "adapter"],
}


@pytest.mark.parametrize("argument", TARGETS)
def test_targets_are_checked_before_the_work(
    argument: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr(models, "load")
    checkpoints.write_model(tmp_path)
    ending = ".png" if argument == "--plot" else ".safetensors"
    Path(f"folder{ending}").mkdir()
    Path("file").touch()
    for target, message in (
        ("target.bin", "; accepted is a file ."),
        (f"folder{ending}", ", which is a folder; accepted is a file ."),
        (f"none/target{ending}", "but none: No such file or directory"),
        (f"file/target{ending}", "but file: Not a directory"),
        (f"/proc/target{ending}", "but /proc: "),
    ):
        error = command.refused(*TARGETS[argument], target)
        assert f"{argument} is {target}" in error
        assert message in error
    assert {x.name for x in tmp_path.iterdir()} == {f"folder{ending}", "file", "model.safetensors"}


def test_targets_that_convert_refuses(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the names, the generation or the weights do not allow."""
    monkeypatch.chdir(tmp_path)
    whole, small, old, quantised = (
        Path(f"{x}.safetensors") for x in ("whole", "small", "old", "quantised")
    )
    checkpoints.write_safetensors(whole, checkpoints.rwkv7(heads=1, head_size=64))
    checkpoints.write_safetensors(small, checkpoints.rwkv7(heads=2, head_size=8))
    checkpoints.write_safetensors(old, checkpoints.official("RWKV-4"))
    models.save(quantised, models.quantize(models.load(whole).params))
    monkeypatch.delattr(models, "load")
    fla, int8 = ("--names", "fla"), ("--quantize", "int8")
    for source, target, options, message in (
        (whole, "new.pth", fla, "TARGET is new.pth; accepted is a folder"),
        (whole, "whole.safetensors/new", fla, "but whole.safetensors: Not a directory"),
        (whole, "new.pth", int8, "TARGET is new.pth; accepted is a file .safetensors"),
        (quantised, "new.pth", (), "TARGET is new.pth; accepted is a file .safetensors"),
        (whole, "new", (*fla, *int8), "accepted for RWKV-7 with quantised weights is official"),
        (quantised, "new", fla, "accepted for RWKV-7 with quantised weights is official"),
        (old, "new", fla, "--names is fla; accepted for RWKV-4 is official"),
        (small, "new", fla, "--names is fla and r_k is [2, 8]; accepted is [H, 64]"),
    ):
        assert message in command.refused("convert", source, target, *options)


def test_eval(tmp_path: Path, command: Command) -> None:
    """All tokens are predicted after the token of the end of a text, and without one all but the
    first."""
    model = checkpoints.write_model(tmp_path, layers=1, vocabulary=257)
    text, picture = tmp_path / "text", tmp_path / "loss.png"
    text.write_text("a text of\r\n世界")
    vocabulary = write_vocabulary(tmp_path / "vocabulary.txt")
    arguments = ["eval", model, "--text", text, "--context", 8, "--batch", 2, "--tokenizer"]
    found = json.loads(command(*arguments, vocabulary, "--json").out)
    assert (found["tokens"], found["bytes"], found["context"]) == (17, 17, 8)
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    parts = found["by_position"]
    assert [(x["first"], x["last"], x["tokens"]) for x in parts] == [
        *((1, 1, 3), (2, 2, 2), (3, 4, 4), (5, 8, 8))
    ]
    assert sum(x["tokens"] * x["loss"] for x in parts) == pytest.approx(17 * found["loss"])
    rows = command(*arguments, "bytes", "--plot", picture).out.splitlines()
    assert "tokens         16" in rows
    assert rows[-1].split()[:4] == ["5", "to", "8", "8"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_perplexity_that_no_float_holds(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = checkpoints.write_model(tmp_path, vocabulary=256), tmp_path / "text"
    text.write_text("abc")
    large = evaluation.Evaluation(np.array([2000.0]), np.array([1]))
    monkeypatch.setattr(evaluation, "evaluate", lambda *_, **__: large)
    found = command("eval", model, "--text", text, "--json").out
    assert json.loads(found, parse_constant=pytest.fail)["perplexity"] is None


def test_texts_that_eval_refuses(tmp_path: Path, command: Command) -> None:
    model, text = checkpoints.write_model(tmp_path), tmp_path / "text"
    for content, tokenizer, message in (
        (b"\xff", ["--tokenizer", "bytes"], "text: the file is no text in UTF-8"),
        (b"a", [], "the vocabulary has 37 tokens, and a tokenizer is known for"),
        (b"a", ["--tokenizer", "bytes"], "accepted with a vocabulary of 37 are 0 to 36"),
    ):
        text.write_bytes(content)
        assert message in command.refused("eval", model, "--text", text, *tokenizer)
    checkpoints.write_model(tmp_path, vocabulary=256)
    error = command.refused("eval", model, "--text", text)
    assert error.endswith("the text has 1 tokens, none to predict\n")
