"""The Pallas kernels without the devices that they are for: run by an interpreter, and lowered."""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import triton
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from support import hlo, internals, meshes
from support.cases import Case
from support.harness import assert_right, check, expected, operands, value_and_gradients
from support.operators import OPERATORS, Run

LOWERING = internals.pallas_lowering()

OPS = ("wkv7", "wkv6", "wkv5")

KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}

each_op = pytest.mark.parametrize("op", OPS)
each_platform = pytest.mark.parametrize("platform", LOWERING.PLATFORMS)


@pytest.fixture(scope="module", params=LOWERING.PLATFORMS)
def interpreted(request: pytest.FixtureRequest):
    """The platform whose kernels run on the CPU."""
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        patch.setattr(LOWERING, "INTERPRET", request.param)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


KERNELS = 6
"""Two to prepare the tiles, two walks along the sequence (forward and backward), one for the states
of all tiles and one for the gradients."""


def _check(op: str, case: Case, **packing: Any) -> None:
    precision = "highest" if case.dtype == "float32" else None
    check(Run(op, "pallas"), case, precision=precision, **packing)


FORMS = (
    ("wkv7", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv6", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv5", Case(1, 65, 1, 32, V=16)),
)
"""A chunk and one token of the next."""

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
def test_several_segments_in_a_row(interpreted: str, op: str, case: Case) -> None:
    _check(op, case, segment_ids=IDS)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
def test_sequences_with_states(interpreted: str) -> None:
    _check("wkv6", Case(1, 70, 1, 16), cu_seqlens=np.array([0, 0, 3, 70], np.int32))


@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
@pytest.mark.parametrize("case", [Case(2, 0, 1, 16), Case(0, 5, 1, 16)], ids=str)
@each_op
def test_nothing_to_do(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.slow
@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
def test_shard_map(interpreted: str, cpus: list) -> None:
    """With an operand, `u`, that all devices have. The interpreter cannot run with `check_vma`."""
    run, (inputs, cotangents) = Run("wkv6", "pallas"), operands("wkv6", Case(2, 17, 1, 16))
    specs = {name: P() if name == "u" else P("d") for name in inputs}

    def spread(check_vma: bool, decay: Any, precision: Any, implementation: Any, **arrays: Any):
        options = {"decay": decay, "precision": precision, "implementation": implementation}
        call = jax.shard_map(
            lambda arrays: run.public(**arrays, **options),
            mesh=meshes.mesh("d=2", AxisType.Auto, cpus),
            in_specs=(specs,),
            out_specs=P("d"),
            check_vma=check_vma,
        )
        return call(arrays)

    checked, unchecked = (functools.partial(spread, check_vma) for check_vma in (True, False))
    value_and_gradients.trace(run, inputs, cotangents, function=checked)
    found = value_and_gradients(run, inputs, cotangents, function=unchecked)
    assert_right(found, expected(run.op, inputs, cotangents))


def _traced(
    op: str, platform: str, case: Case, implementation: str | None = "pallas", **packing: Any
) -> Any:
    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*operands(op, case), packing)
    )
    *inputs, packing = arrays
    options = {"decay": OPERATORS[op].suited(case).decay}
    options["precision"] = "highest" if case.dtype == "float32" else "default"
    with hlo.device(platform):
        run = Run(op, implementation)
        return value_and_gradients.trace(run, *inputs, **options, **packing)


def _lowered(
    op: str, platform: str, case: Case, *implementation: str | None, **packing: Any
) -> str:
    traced = _traced(op, platform, case, *implementation, **packing)
    with hlo.device(platform):
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
    """All kernels are lowered, for whole tiles and for tokens that do not fill one."""
    tokens, decay = (100, "log") if size == 64 else (128, OPERATORS[op].decays[-1])
    text = _lowered(op, platform, Case(2, tokens, 2, size, dtype=dtype, decay=decay))
    assert text.count(KERNEL[platform]) == KERNELS
    if (op, size) == ("wkv7", 64):
        ids = np.ones((2, 100), np.int32)
        text = _lowered(op, platform, Case(2, 100, 2, size, dtype=dtype), segment_ids=ids)
        assert text.count(KERNEL[platform]) == KERNELS


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, also those of the functions that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


LARGEST_OPERAND = 32 * 1024
"""Bytes of an operand of a product of matrices in a GPU kernel. Triton keeps such operands in
shared memory. With a state and its gradient of 64 KB each, the gradients of WKV7 needed 238592
bytes; a Hopper GPU has 232448."""


@each_op
def test_operands_of_products_fit_shared_memory(op: str) -> None:
    traced = _traced(op, "cuda", Case(1, 100, 1, 128, decay="log"))
    kernels = [
        equation.params["jaxpr"]
        for equation in _equations(traced.jaxpr.jaxpr)
        if isinstance(equation.params.get("compiler_params"), triton.CompilerParams)
        and not equation.params["interpret"]
    ]
    assert len(kernels) == KERNELS
    for kernel in kernels:
        for equation in _equations(kernel):
            if equation.primitive is jax.lax.dot_general_p:
                for x in equation.invars:
                    assert x.aval.size * x.aval.dtype.itemsize <= LARGEST_OPERAND, kernel


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
        internals.pretend(monkeypatch, platform, "on holiday")
    for platform, count in (("cuda", KERNELS), ("tpu", 0)):
        jax.clear_caches()
        text = _lowered(op, platform, Case(1, 16, 1, 32), None)
        assert text.count(KERNEL[platform]) == count
    monkeypatch.undo()
    jax.clear_caches()


@each_op
def test_why_not(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOWERING, "INTERPRET", None)

    def reason(case: Case, platform: str) -> str | None:
        inputs, _ = OPERATORS[op].make(case)
        with hlo.device(platform):
            return rwkv_jax.implementations(op, *inputs.values(), platform=platform)["pallas"]

    for platform in LOWERING.PLATFORMS:
        assert reason(Case(1, 5, 1, 16, V=128, dtype="bfloat16"), platform) is None
        for sizes in ((48, 48), (8, 8), (64, 65)):
            case = Case(1, 5, 1, sizes[0], V=sizes[1], dtype="bfloat16")
            refused = f"K = {case.K} and V = {case.V}; the pallas kernels take 16, 32, 64, 128"
            assert reason(case, platform) == refused
        assert reason(Case(1, 5, 1, 128), platform) is None
    for platform in ("cpu", "rocm"):
        refused = "pallas kernels exist for CUDA GPUs and for TPUs"
        assert reason(Case(1, 5, 1, 64), platform) == refused


def test_without_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, _ = operands("wkv7", Case(1, 5, 1, 64))
    reason = internals.why_pallas_cannot_be_imported(monkeypatch, inputs)
    assert reason is not None
    assert "rwkv_jax.wkv7.pallas cannot be imported" in reason
    assert importlib.import_module("rwkv_jax")
