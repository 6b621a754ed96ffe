"""The Pallas kernels without the devices that they are for: run by an interpreter, and lowered."""

import dataclasses
import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
import test_packing
import test_sequences
from rwkv_jax import _dispatch, _ffi, _pallas
from support import hlo, tolerance
from support.cases import Case
from support.operators import OPERATORS, Run, value_and_gradients

OPS = ("wkv7", "wkv6", "wkv5")

KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}

each_op = pytest.mark.parametrize("op", OPS)
each_platform = pytest.mark.parametrize("platform", _pallas.PLATFORMS)


@pytest.fixture(scope="module", params=_pallas.PLATFORMS)
def interpreted(request: pytest.FixtureRequest):
    """The platform whose kernels run on the CPU."""
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        patch.setattr(_pallas, "INTERPRET", request.param)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


KERNELS = 6
"""Forward and backward what is prepared and a walk, then the states of chunks, and gradients."""


def _check(op: str, case: Case, precision: str | None = None) -> None:
    operator = OPERATORS[op]
    case = operator.suited(case)
    inputs, cotangents = operator.make(case)
    highest = precision is None and case.dtype == "float32"
    options = {
        "decay": case.decay,
        "implementation": "pallas",
        "precision": "highest" if highest else precision or "default",
    }
    results = value_and_gradients(op, tuple(options.items()), inputs, cotangents)
    limits = {
        n: tolerance.ceiling(n, case.dtype, sequential=False, highest=highest) for n in results
    }
    expected = operator.oracle(inputs, case.decay, cotangents)
    tolerance.assert_close(jax.device_get(results), expected, limits)
    for name, x in results.items():
        assert x.dtype == ("float32" if "state" in name else case.dtype), name


FORMS = (
    ("wkv7", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv6", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv5", Case(1, 65, 1, 32, V=16)),
)
"""More than a frame, and one chunk more than its last token fills."""

ON_CUDA = (
    ("wkv7", Case(2, 1, 1, 64, state=False)),
    ("wkv7", Case(1, 17, 1, 16, V=32, decay="log", dtype="float16")),
    *(("wkv7", Case(1, 65, 1, 32, decay="exp", regime=x)) for x in ("mixed", "extreme", "near 0")),
    *(("wkv6", Case(1, 65, 1, 32, decay="log", regime=x)) for x in ("mixed", "extreme", "near 0")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), FORMS, ids=str)
def test_both_forms_of_kernels(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
@pytest.mark.parametrize(("op", "case"), ON_CUDA, ids=str)
def test_against_the_oracle(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


IDS = np.array([[0] * 3 + [4] * 20 + [0] * 10 + [4, 5, 6] * 6 + [0] * 2 + [9] * 28])

PACKED = (
    ("wkv7", Case(1, 81, 1, 32, V=16, decay="log", dtype="bfloat16")),
    ("wkv7", Case(1, 81, 1, 16)),
    ("wkv6", Case(1, 81, 1, 16, decay="log", regime="mixed")),
    ("wkv5", Case(1, 81, 1, 16, state=False)),
)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), PACKED, ids=str)
def test_several_sequences_in_a_row(interpreted: str, op: str, case: Case) -> None:
    case = OPERATORS[op].suited(case)
    test_packing.check(Run(op, "pallas"), case, IDS)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
def test_sequences_with_states(interpreted: str) -> None:
    run, cu = Run("wkv6", "pallas"), np.array([0, 0, 3, 70], np.int32)
    inputs, cotangents = test_sequences.made("wkv6", Case(1, 70, 1, 16), 3)
    expected = test_sequences.alone("wkv6", inputs, cu, run.operator.decays[-1], cotangents)
    found = test_sequences.found_by(run, inputs, cotangents, cu)
    test_sequences.assert_right(found, expected)


@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
@pytest.mark.parametrize("case", [Case(2, 0, 1, 16), Case(0, 5, 1, 16)], ids=str)
@each_op
def test_nothing_to_do(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
def test_vmap_of_gradients(interpreted: str) -> None:
    case = Case(1, 17, 1, 16)
    several = [OPERATORS["wkv6"].make(dataclasses.replace(case, seed=n))[0] for n in range(2)]
    stacked = {name: np.stack([x[name] for x in several]) for name in several[0]}

    def gradients(implementation: str):
        def loss(inputs: dict) -> jax.Array:
            options = {"decay": "exp", "precision": "highest", "implementation": implementation}
            y, state = OPERATORS["wkv6"].function(**inputs, **options)
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(state))

        return jax.device_get(jax.vmap(jax.grad(loss))(stacked))

    tolerance.assert_close(gradients("pallas"), gradients("reference"), tolerance.EXACT_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
def test_shard_map(interpreted: str, cpus: list) -> None:
    """With an operand, `u`, that all devices have. The interpreter cannot run with `check_vma`."""
    inputs, _ = OPERATORS["wkv6"].make(Case(2, 17, 1, 16))
    mesh = jax.make_mesh((2,), ("d",), devices=cpus[:2], axis_types=(AxisType.Auto,))
    specs = {name: P() if name == "u" else P("d") for name in inputs}

    def gradients(implementation: str, check_vma: bool, inputs: dict) -> dict:
        def results(inputs: dict) -> tuple:
            return OPERATORS["wkv6"].function(
                **inputs, decay="exp", precision="highest", implementation=implementation
            )

        if implementation == "pallas":
            results = jax.shard_map(
                results, mesh=mesh, in_specs=(specs,), out_specs=P("d"), check_vma=check_vma
            )
        return jax.grad(lambda xs: sum(jnp.sum(jnp.sin(x)) for x in results(xs)))(inputs)

    run = jax.jit(gradients, static_argnums=(0, 1))
    run.trace("pallas", True, inputs)
    tolerance.assert_close(
        jax.device_get(run("pallas", False, inputs)),
        jax.device_get(run("reference", False, inputs)),
        tolerance.EXACT_FLOAT32,
    )


def _lowered(
    op: str,
    platform: str,
    case: Case,
    implementation: str | None = "pallas",
    ids: np.ndarray | None = None,
) -> str:
    inputs, cotangents = OPERATORS[op].make(case)
    inputs |= {} if ids is None else {"segment_ids": ids}
    options = {"decay": OPERATORS[op].suited(case).decay, "implementation": implementation}
    options["precision"] = "highest" if case.dtype == "float32" else "default"
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (inputs, cotangents))
    with hlo.device(platform):
        traced = value_and_gradients.trace(op, tuple(options.items()), *arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
    ("op", "dtype", "size"),
    [
        *((op, "bfloat16", size) for op in ("wkv7", "wkv6") for size in (64, 128)),
        *((op, "float32", 64) for op in OPS),
        *((op, "float32", 128) for op in ("wkv7", "wkv6")),
    ],
)
@each_platform
def test_lowering(platform: str, op: str, dtype: str, size: int) -> None:
    """Of all kernels, with and without a chunk to fill up."""
    for tokens, decay in ((128, OPERATORS[op].decays[-1]), (100, "log")):
        text = _lowered(op, platform, Case(2, tokens, 2, size, dtype=dtype, decay=decay))
        assert text.count(KERNEL[platform]) == KERNELS
    if (op, size) == ("wkv7", 64):
        ids = np.ones((2, 100), np.int32)
        text = _lowered(op, platform, Case(2, 100, 2, size, dtype=dtype), ids=ids)
        assert text.count(KERNEL[platform]) == KERNELS


@each_platform
@each_op
def test_lowering_where_numbers_have_64_bits(platform: str, op: str) -> None:
    with jax.enable_x64(True):
        text = _lowered(op, platform, Case(1, 100, 2, 64))
    assert text.count(KERNEL[platform]) == KERNELS


@each_op
def test_export(op: str) -> None:
    inputs, _ = OPERATORS[op].make(Case(1, 16, 1, 32))
    call = functools.partial(getattr(rwkv_jax, op), decay="log", implementation="pallas")
    with hlo.device("cuda"):
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda"], disabled_checks=rwkv_jax.export_checks()
        )(*inputs.values())
    assert KERNEL["cuda"] in jax.export.deserialize(exported.serialize()).mlir_module()


@each_op
def test_when_it_is_chosen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a name: on CUDA GPUs, where there are no native kernels."""
    for platform in ("cpu", "cuda"):
        monkeypatch.setitem(_ffi.MISSING, platform, "on holiday")
    for platform, expected in (("cuda", KERNELS), ("tpu", 0)):
        jax.clear_caches()
        text = _lowered(op, platform, Case(1, 16, 1, 32), implementation=None)
        assert text.count(KERNEL[platform]) == expected
    monkeypatch.undo()
    jax.clear_caches()


@each_op
def test_why_not(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pallas, "INTERPRET", None)

    def reason(case: Case, platform: str) -> str | None:
        inputs, _ = OPERATORS[op].make(case)
        with hlo.device(platform):
            return rwkv_jax.implementations(op, *inputs.values(), platform=platform)["pallas"]

    for platform in _pallas.PLATFORMS:
        assert reason(Case(1, 5, 1, 16, V=128, dtype="bfloat16"), platform) is None
        for sizes in ((48, 48), (8, 8), (64, 65)):
            case = Case(1, 5, 1, sizes[0], V=sizes[1], dtype="bfloat16")
            expected = f"K = {case.K} and V = {case.V}; the pallas kernels take 16, 32, 64, 128"
            assert reason(case, platform) == expected
        assert reason(Case(1, 5, 1, 128), platform) is None
    for platform in ("cpu", "rocm"):
        expected = "pallas kernels exist for CUDA GPUs and for TPUs"
        assert reason(Case(1, 5, 1, 64), platform) == expected


def test_without_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas", None)
    monkeypatch.delitem(sys.modules, "rwkv_jax._pallas")
    monkeypatch.delitem(sys.modules, "rwkv_jax.wkv7.pallas", raising=False)
    inputs, _ = OPERATORS["wkv7"].make(Case(1, 5, 1, 64))
    shapes = dict(inputs)
    lazy = _dispatch.Lazy("rwkv_jax.wkv7.pallas")
    options = _dispatch.Options("log", jax.lax.Precision.DEFAULT, None)
    reason = lazy.why_not("cuda", "forward", options, shapes)
    assert reason is not None
    assert "rwkv_jax.wkv7.pallas cannot be imported" in reason
    assert importlib.import_module("rwkv_jax")
