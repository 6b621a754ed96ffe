"""The Pallas kernels without the devices that they are for: run by an interpreter, and lowered."""

import contextlib
import functools
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from support import hlo, internals, meshes
from support.cases import Case
from support.harness import assert_right, check, expected, operands, value_and_gradients
from support.operators import OPERATORS, Run

pytestmark = pytest.mark.quick("platform")

LOWERING = internals.pallas_lowering()

KERNEL = {"cuda": "__gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}

each_op = pytest.mark.parametrize("op", ["wkv7", pytest.param("wkv6", marks=pytest.mark.slow)])
"""WKV5 has the kernels of WKV6."""
on_cuda = pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
each_platform = pytest.mark.parametrize("platform", LOWERING.PLATFORMS)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What was traced with other kernels is not found afterwards."""
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


@contextlib.contextmanager
def _interpreting(platform: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        internals.interpret_pallas(patch, platform)
        yield
    jax.clear_caches()


@pytest.fixture(scope="module", params=LOWERING.PLATFORMS)
def interpreted(request: pytest.FixtureRequest):
    """The platform whose kernels run on the CPU."""
    with _interpreting(request.param):
        yield request.param


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
    *(("wkv7", Case(1, 65, 1, 32, decay="exp", regime=x)) for x in ("extreme", "near 0")),
    *(("wkv6", Case(1, 65, 1, 32, decay="log", regime=x)) for x in ("mixed", "near 0")),
)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), FORMS, ids=str)
def test_both_forms_of_kernels(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.slow
@on_cuda
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
@pytest.mark.parametrize(
    ("interpreted", "op", "case"),
    [*(("cuda", *x) for x in PACKED), *(("tpu", *x) for x in PACKED[1:3])],
    indirect=["interpreted"],
    ids=str,
)
def test_several_segments_in_a_row(interpreted: str, op: str, case: Case) -> None:
    _check(op, case, segment_ids=IDS)


CU_SEQLENS = np.array([0, 0, 1, 20, 36, 70], np.int32)

SEQUENCES = (
    ("wkv7", Case(1, 70, 1, 16), CU_SEQLENS),
    ("wkv7", Case(1, 150, 1, 32, V=16, decay="log", dtype="bfloat16", state=False), [0, 16, 150]),
    ("wkv6", Case(1, 70, 1, 16, decay="log", regime="mixed"), [0, 32, 33, 70]),
    ("wkv5", Case(1, 9, 1, 16, dtype="bfloat16"), [0, 4, 4, 9]),
)
"""Sequences of no token, of one, of whole tiles, and of several chunks; a row without a tile."""


@pytest.mark.slow
@on_cuda
@pytest.mark.parametrize(("op", "case", "cu"), SEQUENCES, ids=str)
def test_sequences_with_states(interpreted: str, op: str, case: Case, cu: Any) -> None:
    _check(op, case, cu_seqlens=np.array(cu, np.int32))


@pytest.mark.slow
@on_cuda
def test_sequences_of_mapped_rows(interpreted: str) -> None:
    """With tokens of no sequence, which are NaN, and with offsets that are clamped."""
    run, tokens = Run("wkv6", "pallas"), 100
    several = [[0, 0, 1, 17, 100], [5, 6, 22, 38, 95], [-3, 50, 40, 600, 7]]
    rows = np.array(several, np.int32)
    each = []
    for first, last in ((0, 100), (5, 95), (0, 100)):
        inputs, cotangents = operands(run.op, Case(1, tokens, 1, 16), cu_seqlens=rows[0])
        for x in (*(inputs[name] for name in run.operator.timed), cotangents["dy"]):
            x[:, :first] = x[:, last:] = np.nan
        each.append((inputs, cotangents))
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *each)
    found = jax.vmap(lambda given, cu: value_and_gradients(run, *given, cu_seqlens=cu))(
        stacked, rows
    )
    for i, (given, cu) in enumerate(zip(each, rows, strict=True)):
        own = {name: x[i] for name, x in found.items()}
        assert_right(own, expected(run.op, *given, cu_seqlens=cu))


@pytest.mark.slow
@on_cuda
def test_what_is_not_finite_stays_in_its_sequence(interpreted: str) -> None:
    run, cu = Run("wkv7", "pallas"), CU_SEQLENS
    inputs, cotangents = operands(run.op, Case(1, 70, 1, 16), cu_seqlens=cu)
    right = jax.device_get(value_and_gradients(run, inputs, cotangents, cu_seqlens=cu))
    for x in (*(inputs[name] for name in run.operator.timed), cotangents["dy"]):
        x[:, 20:36] = np.nan
    inputs["initial_state"][3] = cotangents["dfinal_state"][3] = np.inf
    found = jax.device_get(value_and_gradients(run, inputs, cotangents, cu_seqlens=cu))
    assert np.isnan(found["y"][:, 20:36]).all()
    for name, x in found.items():
        axis, place = (0, 3) if "state" in name else (1, range(20, 36))
        others = (np.delete(x, place, axis) for x in (x, right[name]))
        np.testing.assert_array_equal(*others, err_msg=name)


@on_cuda
@pytest.mark.parametrize("case", [Case(2, 0, 1, 16), Case(0, 5, 1, 16)], ids=str)
@each_op
def test_nothing_to_do(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.slow
@on_cuda
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
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (*operands(op, case, **packing), packing)
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
    ("platform", "op", "dtype", "size"),
    [
        *(("cuda", "wkv7", dtype, size) for dtype in ("bfloat16", "float32") for size in (64, 128)),
        *(("cuda", "wkv6", *x) for x in (("bfloat16", 64), ("float32", 128))),
        *((platform, "wkv5", "float32", 64) for platform in LOWERING.PLATFORMS),
    ],
)
def test_lowering(platform: str, op: str, dtype: str, size: int) -> None:
    """All kernels are lowered, for whole tiles and for tokens that do not fill one. Those for TPUs
    test_tpu.py compiles."""
    tokens, decay = (100, "log") if size == 64 else (128, OPERATORS[op].decays[-1])
    text = _lowered(op, platform, Case(2, tokens, 2, size, dtype=dtype, decay=decay))
    assert text.count(KERNEL[platform]) == KERNELS


LOOP = "stablehlo.while"


@pytest.mark.parametrize(
    ("op", "case", "packing", "loops"),
    [
        ("wkv7", Case(1, 70, 2, 64, dtype="bfloat16"), {"cu_seqlens": CU_SEQLENS}, {"tpu": 2}),
        ("wkv7", Case(2, 100, 2, 64), {"segment_ids": np.ones((2, 100), np.int32)}, {}),
        ("wkv6", Case(2, 65, 2, 64), {"segment_ids": np.ones((2, 65), np.int32)}, {}),
        ("wkv5", Case(1, 70, 2, 64), {"cu_seqlens": CU_SEQLENS}, {"tpu": 2}),
    ],
)
@each_platform
def test_lowering_of_packed_rows(
    platform: str, op: str, case: Case, packing: dict[str, Any], loops: dict[str, int]
) -> None:
    """On GPUs no loop goes over chunks."""
    text = _lowered(op, platform, case, **packing)
    assert text.count(KERNEL[platform]) == KERNELS
    assert text.count(LOOP) == loops.get(platform, 0)


def _kernels(op: str, platform: str, case: Case) -> list[dict[str, Any]]:
    """The parameters of the kernels of a call and its gradient."""
    compiled_with = importlib.import_module(LOWERING.PARAMETERS[platform]).CompilerParams
    found = [
        equation.params
        for equation in hlo.equations(_traced(op, platform, case).jaxpr.jaxpr)
        if isinstance(equation.params.get("compiler_params"), compiled_with)
        and not equation.params["interpret"]
    ]
    assert len(found) == KERNELS
    return found


LARGEST_OPERAND = 32 * 1024
"""Bytes of an operand of a product of matrices in a GPU kernel. Triton keeps such operands in
shared memory. With a state and its gradient of 64 KB each, the gradients of WKV7 needed 238592
bytes; a Hopper GPU has 232448."""


@each_op
def test_operands_of_products_fit_shared_memory(op: str) -> None:
    for kernel in _kernels(op, "cuda", Case(1, 100, 1, 128, decay="log")):
        sizes = [
            x.aval.size * x.aval.dtype.itemsize
            for equation in hlo.equations(kernel["jaxpr"])
            if equation.primitive is jax.lax.dot_general_p
            for x in equation.invars
        ]
        assert sizes, kernel["name"]
        assert max(sizes) <= LARGEST_OPERAND, kernel["name"]


VECTOR_MEMORY = 16 * 2**20
"""Bytes that the compiler of a TPU gives a kernel unless it is told otherwise."""


@each_op
def test_blocks_fit_the_memory_of_a_tpu(op: str) -> None:
    """With the largest heads, in float32. A block is there twice, so that one is copied while the
    other is in use. What a tile has besides is at most as much: hence a quarter."""
    for kernel in _kernels(op, "tpu", Case(1, 100, 1, 128, decay="log")):
        total = 0
        for block in kernel["grid_mapping"].block_mappings:
            *_, rows, columns = shape = block.block_aval.shape
            # In tiles of 8 x 128 numbers; Mosaic takes other blocks only as whole axes of an array.
            array = block.array_aval.shape[-2:]
            assert rows % 8 == 0 or rows == array[0], shape
            assert columns in (128, array[1]), shape
            tiles = math.prod(shape[:-2]) * -(-rows // 8) * -(-columns // 128)
            total += 2 * tiles * 8 * 128 * 4
        assert 0 < total <= VECTOR_MEMORY / 4, (kernel["name"], total)


@pytest.mark.quick("op")
@each_platform
@each_op
def test_lowering_where_numbers_have_64_bits(platform: str, op: str) -> None:
    with jax.enable_x64(True):
        text = _lowered(op, platform, Case(1, 100, 2, 64))
    assert text.count(KERNEL[platform]) == KERNELS


@pytest.mark.slow
@each_op
def test_export(op: str) -> None:
    inputs, _ = OPERATORS[op].make(Case(1, 16, 1, 32))
    call = functools.partial(getattr(rwkv_jax, op), decay="log", implementation="pallas")
    with hlo.device("cuda"):
        exported = jax.export.export(
            jax.jit(call), platforms=["cuda"], disabled_checks=rwkv_jax.export_disabled_checks()
        )(*inputs.values())
    assert KERNEL["cuda"] in jax.export.deserialize(exported.serialize()).mlir_module()


@pytest.mark.slow
@each_op
def test_when_it_is_chosen(op: str, patched: pytest.MonkeyPatch) -> None:
    """Without a name: on CUDA GPUs, where there are no native kernels."""
    for platform in ("cpu", "cuda"):
        internals.pretend(patched, platform, "on holiday")
    for platform, count in (("cuda", KERNELS), ("tpu", 0)):
        jax.clear_caches()
        text = _lowered(op, platform, Case(1, 16, 1, 32), None)
        assert text.count(KERNEL[platform]) == count


@each_op
def test_why_not(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOWERING, "INTERPRET", None)

    def reason(case: Case, platform: str) -> str | None:
        inputs, _ = OPERATORS[op].make(case)
        with hlo.device(platform):
            found = rwkv_jax.implementations(op, *inputs.values(), platform=platform)
        return found["pallas"].reason

    for platform in LOWERING.PLATFORMS:
        assert reason(Case(1, 5, 1, 16, V=128, dtype="bfloat16"), platform) is None
        for sizes in ((48, 48), (8, 8), (64, 65)):
            case = Case(1, 5, 1, sizes[0], V=sizes[1], dtype="bfloat16")
            refused = f"K = {case.K} and V = {case.V}; the pallas kernels take 16, 32, 64, 128"
            assert reason(case, platform) == refused
        assert reason(Case(1, 5, 1, 128), platform) is None
        refused = "float16 inputs; on TPUs the pallas kernels take float32 and bfloat16"
        half = reason(Case(1, 5, 1, 64, dtype="float16"), platform)
        assert half == (refused if platform == "tpu" else None)
    for platform in ("cpu", "rocm"):
        refused = "pallas kernels exist for CUDA GPUs and for TPUs"
        assert reason(Case(1, 5, 1, 64), platform) == refused


PALLAS = "jax.experimental.pallas"


@pytest.mark.parametrize(
    ("missing", "cannot", "can"),
    [(f"{PALLAS}.triton", "cuda", "tpu"), (f"{PALLAS}.tpu", "tpu", "cuda"), (PALLAS, "cuda", None)],
)
def test_a_jax_without(
    missing: str, cannot: str, can: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX 0.11 announced that it will lose the Triton backend of Pallas."""
    inputs, _ = operands("wkv7", Case(1, 5, 1, 64))
    for platform in filter(None, (cannot, can)):
        with hlo.device(platform):
            reason = internals.why_not_pallas(monkeypatch, inputs, missing, platform)
        if platform == can:
            assert reason is None
        else:
            assert reason is not None
            what = "rwkv_jax.wkv7.pallas cannot be imported" if can is None else "does not compile"
            assert what in reason
            assert missing.rpartition(".")[2] in reason


def test_what_runs_without_triton(patched: pytest.MonkeyPatch) -> None:
    """On a GPU without native kernels too: plain XLA."""
    internals.pretend(patched, "cuda", "on holiday")
    patched.setitem(sys.modules, f"{PALLAS}.triton", None)
    assert KERNEL["cuda"] not in _lowered("wkv6", "cuda", Case(1, 16, 1, 32), None)
    with pytest.raises(NotImplementedError, match="does not compile pallas kernels for 'cuda'"):
        _lowered("wkv6", "cuda", Case(1, 16, 1, 32))
