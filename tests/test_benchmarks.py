"""The benchmarks of models, decoding, the loss and products: their tables and figures, and the
classes of kernels in a profile; and the comparisons with the official training code, whose kernels
need a GPU, and with the official models."""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import jax
import numpy as np
import pytest

from rwkv_jax.models import rwkv7
from support import scripts
from support.vocabularies import write_vocabulary

DECODE = ["--vocabulary=256", "--tokens=2", "--repeats=1", "--one-process"]
MODEL = ["--rows=2x64x1", "--tokens=32", "--vocabulary=256", "--dtype=float32", "--one-process"]
MODEL += ["--steps=1", "--repeats=2"]
TINY = {"bench_decode": DECODE, "bench_model": MODEL}


@pytest.fixture(autouse=True)
def _as_scripts_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The speed of copies is not measured."""
    with scripts.running("benchmarking.decoding") as decoding:
        monkeypatch.setattr(decoding, "copy_gb_s", lambda clock: 10.0)
        yield


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like the official training code."""
    (tmp_path / "checkout" / "src").mkdir(parents=True)
    (tmp_path / "checkout" / "src" / "model.py").touch()
    return tmp_path / "checkout"


Bench: TypeAlias = Callable[..., Any]


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs a benchmark: its rows of figures. The table says some words."""

    def run(name: str, *options: str, says: tuple[str, ...] = ()) -> Any:
        file = tmp_path / "figures.json"
        options = (*TINY.get(name, ()), *options, f"--json={file}")
        assert importlib.import_module(name).main(options) == 0
        output = capsys.readouterr().out
        assert all(words in output for words in says)
        return json.loads(file.read_text())["rows"]

    return run


# The benchmarks.


@pytest.mark.slow
def test_model(bench: Bench, tmp_path: Path) -> None:
    picture = tmp_path / "share.png"
    more = ("--forward", "--profile", "--model", "implementation=reference", f"--plot={picture}")
    says = ("2x64, batch 1, training", "2x64, batch 1, forward", "of peak", "compile s")
    training, forward = bench("bench_model", *more, says=says)
    assert picture.read_bytes().startswith(b"\x89PNG")
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
    assert set(classes) == set(importlib.import_module("benchmarking.profile").CLASSES)
    assert classes["products"]["ms"] > 0
    assert sum(kind["ms"] for kind in classes.values()) > 0.9 * training["profile"]["step_ms"]


@pytest.mark.slow
def test_long_context(bench: Bench) -> None:
    given = ("--row=1x64x1", "--tokens=32", "--piece=16", "--repeats=1", "--one-process")
    rows = bench("long_context", *given, says=("32, exact", "32, truncated", "peak GB"))
    assert [(row["tokens"], row["gradients"]) for row in rows] == [(32, "exact"), (32, "truncated")]
    assert all(row["tokens_per_second"] > 0 for row in rows)


@pytest.mark.slow
def test_decays_of_other_kinds(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("bench"), "copy_gb_s", lambda: 10.0)
    given = ("--op=wkv6", "--decay=log", "--shapes=1x65x1x16", "--implementations=xla")
    more = ("--device=cpu", "--repeats=1", "--values=24", "--rates", "model", "one token in 4")
    rows = bench("bench", *given, *more, "5 x normal", says=("xla, forward: at worst",))
    ours = [row for row in rows if row["ours"]]
    kinds = [f"1x65x1x16, V 24{kind}" for kind in ("", ", one token in 4", ", 5 x normal")]
    assert [row["shape"] for row in ours] == [kind for kind in kinds for _ in range(2)]
    assert all(row["ms"] > 0 and row["error"] < 1e-5 for row in ours)


def test_decode(bench: Bench) -> None:
    more = ("--rows=1x64x3xfloat32", "--prefill=16", "--pause=0.01", "--generate=2", "--profile")
    says = ("1x64, batch 3, float32, decoding", "prefill", "times floor", "one token", "of loop")
    decoding, generate, prefill = bench("bench_decode", *more, says=says)
    assert generate["share_of_loop"] == pytest.approx(decoding["ms"] / generate["ms"])
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


@pytest.mark.slow
def test_decode_with_zeros(bench: Bench, tmp_path: Path) -> None:
    """Weights have the share of zeros that is asked for, and the floor counts what is left."""
    picture = tmp_path / "decode.png"
    more = ("--rows=1x64x2xfloat32", "--zeros", "0", "75", "100", f"--plot={picture}")
    says = ("weights are made so that", "1x64, batch 2, float32, 75 % zeros, decoding")
    moved = [row["bytes"] for row in bench("bench_decode", *more, says=says)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    value = 4 * 64 * 256
    assert [moved[0] - x for x in moved] == [0, value * 0.75**2, value]
    script = importlib.import_module("bench_decode")
    settings = script.Settings(vocabulary=256, dtype="float32")
    for share in (0.0, 0.75, 1.0):
        row = script.Row(1, 64, 1, "float32", share)
        ffn = script.decoding.parameters(row, settings).blocks[0].ffn
        tokens = np.random.default_rng(0).standard_normal((50, 64)).astype(np.float32)
        tokens -= tokens.mean(1, keepdims=True)
        hidden = (tokens / tokens.std(1, keepdims=True) + 1) @ np.asarray(ffn.key.weight).T
        assert np.mean(hidden <= 0) == pytest.approx(share, abs=0.03)


@pytest.mark.slow
def test_loss(bench: Bench) -> None:
    given = ("--shapes=8x16x32", "--chunk-sizes=4", "--repeats=1")
    rows = bench("bench_loss", *given, says=("8x16x32, forward+backward",))
    names = ("all logits", "cross_entropy", "cross_entropy, recompute", "chunks of 4")
    assert [row["contestant"] for row in rows] == [*names, *names]
    assert all(row["differs"] < 1e-5 for row in rows)


def test_row_product(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = importlib.import_module("bench_row_product")
    monkeypatch.setattr(script, "BYTES", 2**10)
    given = ["--matrices=24x16", "--weights=int8", "--rows", "1", "3", "--repeats=1"]
    assert script.main(given) == 0
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split("|")[1].strip() for line in lines] == ["24x16, int8, 1", "24x16, int8, 3"]
    assert all(float(line.split("|")[4]) > 0 for line in lines)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bench_model", ["--model", "implementation=abc"], "failed: ValueError: wkv7"),
        ("bench_decode", ["--rows=2x65x1"], "failed: ValueError: rwkv7: hidden_size is 65"),
        # The fused kernels are for few rows.
        ("bench_decode", ["--rows=1x64x9", "--fused"], "implementation 'fused' cannot run"),
    ],
)
def test_failure_is_a_line_of_the_table(
    name: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert importlib.import_module(name).main([*TINY[name], *options]) == 1
    assert message in capsys.readouterr().out


def test_bad_options(tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decode = "--rows=2x64 --rows=2x64x1xint3 --tokens=0 --zeros=101 --invariant=0"
    model = "--rows=2x64 --model=abc=1 --steps=0 --official-options=abc=1"
    for name, arguments, message in (
        *(("bench_decode", [x], x[2:].partition("=")[0]) for x in decode.split()),
        *(("bench_model", [x], x[2:].partition("=")[0]) for x in model.split()),
        ("bench_model", ["--official", str(tmp_path)], "a checkout of"),
        ("compare_official", [str(tmp_path)], "accepted is a checkout of"),
        ("compare_official", [str(checkout), "--tokenizer=abc"], "tokenizer is 'abc'"),
    ):
        with pytest.raises(SystemExit):
            importlib.import_module(name).main([*TINY.get(name, ()), *arguments])
        assert message in capsys.readouterr().err


# Classes of kernels.


def trace(streams: dict[str, list[tuple[str, str, int, int]]]) -> str:
    """A profile of a GPU whose streams ran kernels: each with the name of its instruction, its own
    name, and when it began and ended, in microseconds."""
    names: dict[str, int] = {}
    text = 'planes { name: "/device:GPU:0" stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    for stream, kernels in streams.items():
        text += f' lines {{ name: "{stream}"'
        for instruction, name, begin, end in kernels:
            text += (
                f" events {{ metadata_id: {names.setdefault(name, len(names) + 1)}"
                f" offset_ps: {begin * 10**6} duration_ps: {(end - begin) * 10**6}"
                f' stats {{ metadata_id: 1 str_value: "{instruction}" }} }}'
            )
        text += " }"
    for name, i in names.items():
        text += f' event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}'
    return text + " }"


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


def test_classes_of_kernels() -> None:
    profile = importlib.import_module("benchmarking.profile")
    of_streams = trace(
        {
            "Stream #13(Compute)": [
                ("cublas-gemm.1", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", 0, 4),
                ("gemm_fusion_dot.2", "gemm_fusion_dot_2", 4, 6),
                ("custom-call.3", "void rwkv_jax::cuda::ChunkKernel<64>()", 7, 9),
                ("custom-call.4", "void rwkv_jax::cuda::ChunkKernel<64>()", 9, 10),
                ("loop_add_fusion", "loop_add_fusion", 10, 13),
                # Of these the name alone tells the class.
                ("", "void rwkv_jax::cuda::GradientKernel<__nv_bfloat16, 64, false>()", 20, 40),
                ("", "void rwkv_jax::cuda::ProductKernel<true>(CUtensorMap_st)", 40, 140),
                ("", "rwkv_jax::cuda::TransposeKernel(uint4 const*, int, int)", 140, 340),
                ("", "void BackwardKernel<4, 6>(rwkv_jax::NormShiftMixBackwardCall)", 340, 350),
                ("", "void ForwardKernel<8>(rwkv_jax::Wkv7KeysForwardCall)", 350, 370),
                ("", "nvjet_sm90_sss_128x160_64x5_2x1_v_bz_NNT", 370, 770),
                ("", "nvjet_tss_64", 770, 1570),
            ],
            "Stream #14(MemcpyD2D)": [("", "MemcpyD2D", 12, 20)],
            # A third of it travels while the last product is computed.
            "Stream #15(Compute)": [("", "ncclDevKernel_AllGather_RING_LL()", 1560, 1590)],
            "XLA Ops": [("", "loop_add_fusion", 0, 900)],
        }
    )
    kernels = profile.kernels(jax.profiler.ProfileData.from_text_proto(of_streams))
    found = profile.by_class(kernels, profile.instructions(PROGRAM), 2)
    # Microseconds of two steps are milliseconds / 500 of one. No kernel ran from 6 to 7.
    ms = {name: round(kind["ms"] * 2000, 3) for name, kind in found["classes"].items()}
    assert ms == {
        "products": 6 + 1500,
        "wkv": 2 + 20,
        "other kernels of rwkv_jax": 1 + 30,
        "memory-bound fusions": 3,
        "copies": 8,
        "collectives": 30,
        "gaps": 1,
    }
    assert found["exposed_ms"] == pytest.approx(20 / 2000)
    assert found["classes"]["products"]["count"] == 3
    assert found["tf32"] == {"ms": pytest.approx((2 + 400) / 2000), "count": 1}
    assert found["step_ms"] == pytest.approx(1590 / 2000)
    assert found["kernels"][0]["name"] == "nvjet_tss_64"


# Comparisons with official code.


@pytest.mark.slow
def test_official_models(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("compare_models").main
    assert main(["--versions", "RWKV-4", "--tokens", "4", "--vocabulary", "30"]) == 0
    assert "| RWKV-4   |   42/42 |" in capsys.readouterr().out


def test_losses_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    compare = importlib.import_module("compare_official")
    losses = {"official": [3.0, 2.0, 1.0], "bfloat16": [3.0, 2.5, 1.0], "float32": [3.0, 2.0, 1.25]}
    assert compare.print_losses(losses, 2) == {"bfloat16": 0.5, "float32": 0.25}
    output = capsys.readouterr().out
    assert ("| 2 " in output, "| 1 " in output) == (True, False)
    assert "bfloat16: differs by 0.5000 at most" in output


def test_compared_steps_read_tokens(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    compare = importlib.import_module("compare_official")
    vocabulary = write_vocabulary(checkout / "vocabulary.txt", ["ab"])
    text = np.frombuffer(b"ab" * 40, np.uint8)
    monkeypatch.setattr(compare.data, "read", lambda folder, pattern: (text, text))
    sizes = ["--batch=2", "--context=16", "--steps=3"]
    args = compare.parse([str(checkout), f"--tokenizer={vocabulary}", *sizes])
    assert compare.config_of(args).vocab_size == 258
    for batch in compare.batches(args):
        np.testing.assert_array_equal(batch, np.full((2, 17), 257))


@pytest.mark.slow
def test_compared_steps_are_those_of_train(monkeypatch: pytest.MonkeyPatch, checkout: Path) -> None:
    """The same losses as from the step of train.py, which has no L2 wrap."""
    compare = importlib.import_module("compare_official")
    train = scripts.load(scripts.TRAIN)
    steps = importlib.import_module("rwkv_jax._training.steps")
    sizes = ["--layers=1", "--width=64", "--batch=2", "--context=16", "--steps=4", "--warmup=2"]
    args = compare.parse([str(checkout), "--tokenizer=bytes", *sizes])
    monkeypatch.setattr(compare, "L2_WRAP", 0.0)
    losses = compare.train(args, compare.initial_weights(args), "float32")

    config = compare.config_of(args)
    params = jax.jit(lambda: rwkv7.init(jax.random.key(args.seed), config))()
    params = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32"), params)
    mesh = train.devices.make_mesh(None, config, batch=args.batch, context=args.context)
    model = train.language_model.make_model(config, mesh, dtype="float32", implementation=None)
    rate = f"--learning-rate={args.learning_rate}"
    given = train.options.parse(["--steps=4", "--warmup=2", rate])
    optimizer = train.loop.make_optimizer(given)
    shapes = steps.state_shapes(model, optimizer)
    state = steps.initial_state(model, optimizer, shapes, seed=0, initial=train.Parts(params))
    step, found = steps.train_step(model, optimizer, shapes, 0.0, clip=given.clip), []
    for x in compare.batches(args):
        state, measures = step(state, train.data.windows(x))
        found.append(float(measures.loss))
    assert losses == pytest.approx(found, abs=1e-5)
    assert losses[-1] < losses[0]
