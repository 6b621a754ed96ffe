"""The benchmark of whole models: its table, and the classes of kernels in a profile; and the
comparison with the official training code, whose kernels need a GPU."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import optax
import pytest
from flax import nnx

SCRIPTS = Path(__file__).parents[1] / "scripts"

TRACE = """
planes {
  name: "/device:GPU:0"
  lines {
    name: "Stream #13(Compute)"
    events {
      metadata_id: 1 offset_ps: 0 duration_ps: 4000000
      stats { metadata_id: 1 str_value: "cublas-gemm.1" }
    }
    events {
      metadata_id: 2 offset_ps: 4000000 duration_ps: 2000000
      stats { metadata_id: 1 str_value: "gemm_fusion_dot.2" }
    }
    events {
      metadata_id: 3 offset_ps: 7000000 duration_ps: 2000000
      stats { metadata_id: 1 str_value: "custom-call.3" }
    }
    events {
      metadata_id: 3 offset_ps: 9000000 duration_ps: 1000000
      stats { metadata_id: 1 str_value: "custom-call.4" }
    }
    events {
      metadata_id: 4 offset_ps: 10000000 duration_ps: 3000000
      stats { metadata_id: 1 str_value: "loop_add_fusion" }
    }
  }
  lines {
    name: "Stream #14(MemcpyD2D)"
    events { metadata_id: 5 offset_ps: 12000000 duration_ps: 4000000 }
  }
  lines {
    name: "XLA Ops"
    events { metadata_id: 4 offset_ps: 0 duration_ps: 900000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT" } }
  event_metadata { key: 2 value { id: 2 name: "gemm_fusion_dot_2" } }
  event_metadata { key: 3 value { id: 3 name: "void rwkv_jax::cuda::ChunkKernel<64>()" } }
  event_metadata { key: 4 value { id: 4 name: "loop_add_fusion" } }
  event_metadata { key: 5 value { id: 5 name: "MemcpyD2D" } }
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
}
planes {
  name: "/host:CPU"
  lines {
    name: "threads"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 900000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "PjRtExecute" } }
}
"""

PROGRAM = """
HloModule jit_step

%gemm_fusion_dot.2_computation (p0: f32[64,64], p1: f32[64,64]) -> f32[64,64] {
  %p0 = f32[64,64] parameter(0)
  %p1 = f32[64,64] parameter(1)
  ROOT %dot.5 = f32[64,64] dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims=
}

ENTRY %main (x: bf16[64,64], y: f32[64,64]) -> f32[64,64] {
  %x = bf16[64,64] parameter(0)
  %y = f32[64,64] parameter(1)
  %cublas-gemm.1 = (f32[64,64], s8[4]) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %gemm_fusion_dot.2 = f32[64,64] fusion(%y, %y), kind=kCustom, calls=%gemm_fusion_dot.2_computation
  %custom-call.3 = f32[64,64] custom-call(%y), custom_call_target="rwkv_wkv7_fwd_v2"
  %custom-call.4 = f32[64,64] custom-call(%y), custom_call_target="rwkv_norm_shift_mix_fwd_v1"
  ROOT %loop_add_fusion = f32[64,64] fusion(%y, %y), kind=kLoop, calls=%fused_add
}
"""


@pytest.fixture(autouse=True)
def _as_scripts_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of scripts can be imported, and the strictness that tests ask of the package is not
    asked of optax."""
    monkeypatch.syspath_prepend(SCRIPTS)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def script() -> ModuleType:
    return importlib.import_module("bench_model")


@pytest.fixture
def compare() -> ModuleType:
    return importlib.import_module("compare_official")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the official training code."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "model.py").touch()
    return tmp_path


TINY = ["--rows=2x64x1", "--tokens=32", "--vocabulary=256", "--dtype=float32", "--one-process"]
TINY += ["--steps=1", "--repeats=2"]


def test_table(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    given = ["--forward", "--profile", "--model", "implementation=reference", f"--json={file}"]
    given += [f"--plot={tmp_path / 'share.png'}"]
    assert script.main([*TINY, *given]) == 0
    output = capsys.readouterr().out
    for words in ("2x64, batch 1, training", "2x64, batch 1, forward", "of peak", "compile s"):
        assert words in output
    assert (tmp_path / "share.png").read_bytes().startswith(b"\x89PNG")
    training, forward = json.loads(file.read_text())["rows"]
    assert [training["pass"], forward["pass"]] == ["training", "forward"]
    for row in (training, forward):
        assert row["ms"] >= row["best_ms"] > 0
        assert row["tokens_per_second"] == pytest.approx(32 / row["ms"] * 1e3)
        assert row["argument_bytes"] > 0
        assert min(row[f"{stage}_s"] for stage in ("trace", "lower", "compile")) > 0
    # Parameters and two moments in float32; the forward pass has the parameters alone.
    assert training["argument_bytes"] == pytest.approx(3 * forward["argument_bytes"], rel=0.01)
    flops = training["share_of_peak"] * 989e12 * training["ms"] / 1e3 / 32
    numbers = 2 * (64 * 64 * 12 + 64 * 2 * (32 + 32 + 32) + 2 * 64 * 32) - 2 * 64 * 32 + 64 * 256
    assert flops == pytest.approx(6 * numbers + 24 * 2 * 64 * 64)
    classes = training["profile"]["classes"]
    assert set(classes) == set(script.profile.CLASSES)
    assert classes["products"]["ms"] > 0
    assert sum(kind["ms"] for kind in classes.values()) > 0.9 * training["profile"]["step_ms"]


@pytest.mark.slow
def test_scan_over_blocks(script: ModuleType, tmp_path: Path) -> None:
    """The same operations, bytes of arguments and loss as without a scan."""
    figures = []
    for more in ([], ["--scan", "--model", "recompute=cheap"]):
        file = tmp_path / "figures.json"
        assert script.main([*TINY, *more, f"--json={file}"]) == 0
        figures += json.loads(file.read_text())["rows"]
    plain, scan = figures
    assert scan["argument_bytes"] == pytest.approx(plain["argument_bytes"], rel=1e-3)
    assert scan["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    operations = [row["share_of_peak"] * row["ms"] for row in figures]
    assert operations[0] == pytest.approx(operations[1])


def test_failure_is_a_line_of_the_table(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main([*TINY, "--model", "implementation=abc"]) == 1
    assert "failed: ValueError: wkv7" in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", ["--rows=2x64", "--model=abc=1", "--steps=0", "--official-options=abc=1"]
)
def test_bad_option(script: ModuleType, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main([*TINY, option])
    assert option.lstrip("-").partition("=")[0] in capsys.readouterr().err


def test_classes_of_kernels(script: ModuleType) -> None:
    data = jax.profiler.ProfileData.from_text_proto(TRACE)
    program = script.profile.instructions(PROGRAM)
    found = script.profile.by_class(script.profile.kernels(data), program, 2)
    # Microseconds of two steps are milliseconds / 500 of one. No kernel ran from 6 to 7.
    ms = {name: round(kind["ms"] * 2000, 3) for name, kind in found["classes"].items()}
    assert ms == {
        "products": 6,
        "wkv": 2,
        "other kernels of rwkv_jax": 1,
        "memory-bound fusions": 3,
        "copies": 4,
        "gaps": 1,
    }
    assert found["classes"]["products"]["count"] == 1
    assert found["tf32"] == {"ms": pytest.approx(0.001), "count": 0.5}
    assert found["step_ms"] == pytest.approx(0.008)
    assert found["kernels"][0]["name"].startswith("nvjet")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void rwkv_jax::cuda::GradientKernel<__nv_bfloat16, 64, false>()", "wkv"),
        ("void rwkv_jax::cuda::ProductKernel<true>(CUtensorMap_st)", "products"),
        ("rwkv_jax::cuda::TransposeKernel(uint4 const*, uint4*, int, int)", "products"),
        ("void BackwardKernel<4, 6>(rwkv_jax::NormShiftMixBackwardCall)", "other kernels"),
        ("void ForwardKernel<8>(rwkv_jax::Wkv7KeysForwardCall)", "other kernels"),
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "products"),
    ],
)
def test_classes_by_name_alone(script: ModuleType, name: str, expected: str) -> None:
    kernel = script.profile.Kernel(name, 0.0, 1.0, "")
    assert script.profile.class_of(kernel, {}).startswith(expected)


@pytest.mark.parametrize(
    ("name", "tf32"),
    [("nvjet_sm90_tst_128x160", False), ("nvjet_sm90_sss_128x160", True), ("nvjet_tss_64", False)],
)
def test_products_of_float32_by_name(script: ModuleType, name: str, tf32: bool) -> None:
    assert bool(script.profile.TF32.search(name)) == tf32


def test_official_code_that_is_not_there(
    script: ModuleType,
    compare: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for main, arguments in (
        (script.main, ["--official", str(tmp_path)]),
        (compare.main, [str(tmp_path)]),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "accepted is a checkout of" in capsys.readouterr().err


def test_losses_are_compared(compare: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    losses = {"official": [3.0, 2.0, 1.0], "bfloat16": [3.0, 2.5, 1.0], "float32": [3.0, 2.0, 1.25]}
    assert compare.print_losses(losses, 2) == {"bfloat16": 0.5, "float32": 0.25}
    output = capsys.readouterr().out
    assert "| 2 " in output
    assert "| 1 " not in output
    assert "bfloat16: differs by 0.5000 at most" in output


def test_compared_steps_read_tokens(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    vocabulary = checkout / "vocabulary.txt"
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab"]
    lines = (f"{number} {token!r} {len(token)}\n" for number, token in enumerate(tokens, 1))
    vocabulary.write_text("".join(lines))
    text = np.frombuffer(b"ab" * 40, np.uint8)
    monkeypatch.setattr(compare.data, "read", lambda folder, pattern: (text, text))
    sizes = ["--batch=2", "--context=16", "--steps=3"]
    args = compare.parse([str(checkout), f"--tokenizer={vocabulary}", *sizes])
    assert compare.config_of(args).vocabulary == 258
    for batch in compare.batches(args):
        np.testing.assert_array_equal(batch, np.full((2, 17), 257))


def test_compared_steps_need_a_tokenizer(
    compare: ModuleType, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        compare.main([str(checkout), "--tokenizer=abc"])
    assert "tokenizer is 'abc'" in capsys.readouterr().err


@pytest.mark.slow
def test_compared_steps_are_those_of_train(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, checkout: Path
) -> None:
    """The same losses as from the step of train.py, which has no L2 wrap."""
    sizes = ["--layers=1", "--width=64", "--batch=2", "--context=16", "--steps=4", "--warmup=2"]
    args = compare.parse([str(checkout), *sizes])
    monkeypatch.setattr(compare, "L2_WRAP", 0.0)
    weights = compare.initial_weights(args)
    losses = compare.train(args, weights, "float32")

    steps = importlib.import_module("training.steps")
    loop = importlib.import_module("training.loop")
    data = importlib.import_module("training.data")
    devices = importlib.import_module("training.devices")
    config = compare.config_of(args)
    mesh = devices.make_mesh(None, config, batch=args.batch, context=args.context)
    model = importlib.import_module("training.language_model").make_model(
        config, mesh, dtype="float32", implementation=None, seed=0
    )
    for name, x in steps.variables(
        model, nnx.Optimizer(model, optax.identity(), wrt=nnx.Param)
    ).items():
        if name.startswith("model."):
            x[...] = jax.numpy.asarray(weights[name.removeprefix("model.")])
    optimizer = nnx.Optimizer(model, loop.make_optimizer(args), wrt=nnx.Param)
    given = model, optimizer, steps.Copies(mesh, model)
    found = [float(steps.train_step(*given, data.Batch(x), mesh)) for x in compare.batches(args)]
    assert losses == pytest.approx(found, abs=1e-5)
    assert losses[-1] < losses[0]
