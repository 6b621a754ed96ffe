"""The CUDA handlers and kernels run by a CPU, on emulated devices: kernels on matrix units, as the
code for sm_80 without warpgroup products, and the kernels that go token by token in float32.

The package itself makes the operands, asks for scratch and calls a target, whose handler plans the
call for the emulated device. Every block is run warp by warp in an order drawn from a seed. Results
that depend on the seed show a missing barrier.

On a machine with a GPU the same tests run the kernels there, while JAX stays on the CPU, and so
under compute-sanitizer (memcheck or racecheck):

    JAX_PLATFORMS=cpu compute-sanitizer --tool memcheck \\
        python -m pytest --kernels-on-gpu sm_90a tests/test_emulation.py
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import models as all_models
from rwkv_jax.models import rwkv7
from support import harness, internals, language_models, layer_functions, meshes, models, tolerance
from support.cases import CU_SEQLENS, Arrays, Case
from support.emulation import DEVICES, Call, Device, Emulation, needs_emulation
from support.layer_functions import ELEMENTWISE, LAYER_FUNCTIONS
from support.operators import DELTA_STEPS, OPERATORS, SEQUENCES, Run

pytestmark = [needs_emulation, pytest.mark.slow]
GATED, KIMI = "gated_delta_rule", "kimi_delta_attention"


@functools.cache
def _variant(function: Any, *variant: Any) -> Any:
    """A function under a name of its own in JAX's caches for each variant."""
    return lambda *operands, **options: function(*operands, **options)


def _found(
    emulated: Emulation, op: str, inputs: Arrays, cotangents: Arrays, seed: int = 1, **options: Any
) -> dict[str, np.ndarray]:
    """Results and gradients of an operator, the warps in an order drawn from a seed."""
    emulated.module.seed(seed)
    function = _variant(getattr(rwkv_jax, op), emulated.share, internals.packing.LONG)
    found = harness.value_and_gradients(
        Run(op, "ffi"), inputs, cotangents, function=function, **options
    )
    return {name: np.asarray(x) for name, x in found.items()}


def _assert_same(found: Arrays, others: Arrays) -> None:
    for name, x in found.items():
        assert x.tobytes() == others[name].tobytes(), name


def _check(
    emulated: Emulation,
    op: str,
    case: Case,
    *,
    seeds: Sequence[int] = (1, 2),
    precision: str | None = None,
    **rows: Any,
) -> dict[str, np.ndarray]:
    """Results and gradients, which are close to those of the oracle, the same for all seeds, and
    zeros for padding. Kernels on matrix units run unless they have too little shared memory; of
    float32 they are as close as those that go token by token."""
    inputs, cotangents = harness.operands(op, case, **rows)
    options = {"decay": case.decay, **rows}
    found, *others = (
        _found(emulated, op, inputs, cotangents, seed, precision=precision, **options)
        for seed in seeds
    )
    expected = harness.expected(op, inputs, cotangents, **options)
    exact = case.dtype == "float32" or not emulated.on_matrix_units
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=exact, highest=exact) for n in found}
    harness.assert_right(found, expected, limits)
    for other in others:
        _assert_same(found, other)
    for plan in emulated.plans:
        suits = 0 < plan["shared_memory"] <= emulated.gpu.shared_memory
        assert suits == (plan["kernel"] == "matrix units"), plan
    padding = rows.get("segment_ids", np.ones(1)) == 0
    timed = Run(op, "ffi").operator.timed
    for name in ("y", *(f"d{n}" for n in timed)) if padding.any() else ():
        assert not found[name][padding].any(), name
    return found


EXACT = "highest"
"""Kernels that go token by token compute in float32 throughout."""

ALONE = [
    ("wkv7", Case(1, 16, 1, 64, dtype="bfloat16"), None, 132, 1),
    ("wkv7", Case(1, 65, 2, 64, dtype="bfloat16", decay="exp"), None, 1, 1),
    ("wkv7", Case(1, 200, 1, 64, dtype="float16", decay="log"), None, 132, 0.45),
    ("wkv7", Case(1, 81, 1, 128, dtype="float16", decay="exp", regime="near 1"), None, 132, 1),
    ("wkv7", Case(1, 70, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), None, 1, 1),
    ("wkv7", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp", regime="mixed"), None, 132, 1),
    ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16", decay="log", regime="near 0"), None, 1, 1),
    ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16", decay="exp", regime="extreme"), None, 132, 1),
    ("wkv7", Case(1, 70, 1, 128, dtype="bfloat16", decay="exp", regime="mixed"), None, 8, 1),
    ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16", decay="log", regime="steep"), None, 132, 1),
    ("wkv7", Case(1, 70, 1, 128, dtype="float16", decay="exp", regime="steep"), None, 1, 1),
    ("wkv7", Case(1, 16, 1, 64), None, 132, 1),
    ("wkv7", Case(1, 200, 1, 64), None, 132, 0.4),
    ("wkv7", Case(1, 81, 1, 64, decay="exp", regime="mixed"), None, 1, 1),
    ("wkv7", Case(1, 81, 1, 64, decay="log", regime="near 1"), None, 132, 1),
    ("wkv7", Case(1, 130, 1, 64, decay="exp", regime="near 0"), None, 132, 1),
    ("wkv7", Case(1, 81, 1, 64, decay="log", regime="extreme"), None, 1, 1),
    ("wkv7", Case(1, 130, 1, 64, decay="exp", regime="steep"), None, 1, 1),
    ("wkv7", Case(1, 81, 1, 64, regime="extreme"), None, 132, 1),
    ("wkv7", Case(1, 81, 1, 64, decay="log"), EXACT, 132, 1),
    ("wkv7", Case(1, 130, 2, 32, dtype="bfloat16"), None, 132, 0.6),
    ("wkv7", Case(1, 81, 2, 96, V=48, dtype="bfloat16"), None, 132, 1),
    ("wkv7", Case(1, 81, 2, 40, V=128, dtype="float16", decay="exp", regime="mixed"), None, 4, 1),
    ("wkv7", Case(1, 130, 2, 48, V=24, dtype="bfloat16", decay="log", regime="steep"), None, 1, 1),
    ("wkv7", Case(1, 200, 1, 64, V=128, dtype="bfloat16"), None, 132, 1),
    ("wkv7", Case(1, 81, 2, 64, V=128, dtype="bfloat16", decay="log", regime="steep"), None, 1, 1),
    ("wkv7", Case(1, 81, 1, 64, V=128, decay="exp", regime="steep"), None, 132, 1),
    ("wkv7", Case(1, 70, 1, 128, V=192, dtype="float16", decay="log"), None, 1, 1),
    ("wkv7", Case(1, 70, 2, 16, decay="exp", regime="mixed"), EXACT, 1, 0.3),
    ("wkv7", Case(1, 133, 1, 32, dtype="float16", decay="log"), EXACT, 132, 0.7),
    ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16"), EXACT, 132, 1),
    (GATED, Case(1, 130, 2, 128, dtype="bfloat16", decay="log"), None, 132, 1),
    (GATED, Case(1, 81, 2, 72, V=40, dtype="float16", decay="log"), None, 1, 1),
    (
        GATED,
        Case(1, 37, 2, 128, V=64, dtype="float16", decay="log", regime="extreme"),
        None,
        132,
        1,
    ),
    (GATED, Case(1, 70, 2, 64, V=192, dtype="bfloat16", decay="log"), None, 1, 1),
    (KIMI, Case(1, 200, 2, 64, dtype="float16", decay="log"), None, 132, 1),
    (KIMI, Case(1, 81, 2, 64, V=128, dtype="bfloat16", decay="log", regime="steep"), None, 132, 1),
    (KIMI, Case(1, 70, 2, 128, V=96, dtype="bfloat16", decay="log", regime="mixed"), None, 1, 1),
    (KIMI, Case(1, 130, 1, 128, dtype="bfloat16", decay="log", regime="steeper"), None, 132, 1),
    ("wkv5", Case(1, 0, 2, 16, decay="log"), None, 132, 1),
    ("wkv6", Case(2, 1, 1, 32, decay="log"), None, 132, 1),
    ("wkv6", Case(2, 70, 2, 16, decay="exp", regime="mixed"), None, 1, 0.3),
    ("wkv6", Case(1, 70, 2, 64, decay="exp"), None, 1, 1),
    ("wkv6", Case(1, 130, 1, 64, decay="log", regime="mixed"), None, 132, 1),
    ("wkv6", Case(2, 17, 1, 64, decay="exp", regime="near 1"), None, 132, 1),
    ("wkv6", Case(1, 81, 1, 64, decay="exp", regime="extreme"), None, 1, 1),
    ("wkv6", Case(1, 200, 1, 64, decay="log", regime="steep"), None, 132, 1),
    ("wkv5", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv6", Case(1, 130, 1, 128, decay="log"), None, 132, 0.7),
    ("wkv6", Case(1, 16, 2, 64, dtype="bfloat16", decay="exp"), None, 132, 1),
    ("wkv6", Case(2, 81, 1, 64, dtype="float16", decay="log"), None, 1, 1),
    ("wkv5", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp"), None, 1, 1),
    ("wkv6", Case(1, 130, 1, 64, dtype="bfloat16", decay="exp", regime="mixed"), None, 132, 1),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log", regime="near 0"), None, 132, 1),
    ("wkv6", Case(1, 130, 1, 128, dtype="bfloat16", decay="exp", regime="mixed"), None, 132, 1),
    ("wkv5", Case(1, 200, 1, 128, dtype="bfloat16", decay="exp"), None, 1, 1),
    ("wkv4", Case(1, 0, 1, 32, decay="log"), None, 132, 1),
    ("wkv4", Case(2, 1, 1, 16, decay="log"), None, 132, 1),
    ("wkv4", Case(2, 69, 1, 64, decay="exp"), None, 1, 1),
    ("wkv4", Case(1, 200, 1, 33, decay="log"), None, 3, 1),
    ("wkv4", Case(2, 130, 1, 35, dtype="bfloat16", decay="exp"), None, 132, 1),
    ("wkv4", Case(1, 128, 1, 64, dtype="bfloat16", decay="log", regime="near 1"), None, 132, 0),
    ("wkv4", Case(1, 133, 1, 40, decay="log", regime="near 0"), None, 1, 1),
    ("wkv4", Case(2, 133, 1, 40, decay="log", regime="extreme"), None, 132, 1),
    ("wkv4", Case(1, 133, 1, 64, dtype="bfloat16", decay="exp", regime="extreme"), None, 132, 0),
    ("wkv4", Case(1, 133, 1, 64, dtype="float16", decay="log", regime="mixed"), None, 132, 1),
    ("wkv4_step", Case(3, 1, 1, 100, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv4_step", Case(2, 1, 1, 33, decay="log", regime="mixed"), EXACT, 132, 1),
    ("wkv5_step", Case(2, 1, 1, 32, dtype="float16", decay="log"), EXACT, 132, 1),
    ("wkv6_step", Case(2, 1, 2, 64, dtype="bfloat16", decay="exp"), EXACT, 132, 1),
    ("wkv7_step", Case(2, 1, 1, 128, dtype="bfloat16"), EXACT, 132, 1),
    ("wkv7_step", Case(1, 1, 2, 64, decay="log", regime="extreme"), EXACT, 132, 1),
    ("gated_delta_rule_step", Case(2, 1, 4, 128, dtype="bfloat16", decay="log"), EXACT, 132, 1),
    ("gated_delta_rule_step", Case(1, 1, 3, 16, decay="log"), EXACT, 132, 1),
    ("gated_delta_rule_step", Case(1, 1, 2, 64, dtype="float16", decay="log"), EXACT, 132, 1),
    ("kimi_delta_attention_step", Case(1, 1, 2, 128, decay="log"), EXACT, 132, 1),
    (
        "kimi_delta_attention_step",
        Case(2, 1, 4, 32, dtype="bfloat16", decay="log", regime="mixed"),
        EXACT,
        132,
        1,
    ),
]
"""Each with a precision, the number of multiprocessors, and the share of scratch. Few
multiprocessors or little scratch mean few splits, or one; little scratch also means that few heads
at a time go token by token backwards. A step updates the state in place."""


@pytest.mark.parametrize(("op", "case", "precision", "multiprocessors", "share"), ALONE, ids=str)
def test_a_sequence_in_each_row(
    emulated: Emulation,
    op: str,
    case: Case,
    precision: str | None,
    multiprocessors: int,
    share: float,
) -> None:
    emulated.use(Device(multiprocessors), share)
    _check(emulated, op, case, precision=precision)


@pytest.mark.parametrize("op", DELTA_STEPS)
def test_a_step_of_the_delta_rule_is_one_kernel_and_rounds_no_operand(
    emulated: Emulation, op: str
) -> None:
    """At any precision; but the highest one also takes a `g` of float32 as it is."""
    inputs, _ = harness.operands(op, Case(2, 1, 4, 64, dtype="bfloat16", decay="log"))
    step = functools.partial(getattr(rwkv_jax, op), **inputs, implementation="ffi")
    found, exact = ([*map(np.asarray, step(precision=x))] for x in (None, EXACT))
    assert emulated.files == {f"rwkv_{op}_v1": {"step.cu"}}
    assert [x.tobytes() for x in found] == [x.tobytes() for x in exact]
    options = {"g": 1.001 * inputs["g"].astype(np.float32), "precision": EXACT}
    y, state = step(**options)
    expected, expected_state = step(**options | {"implementation": "reference"})
    assert y.dtype == expected.dtype
    assert tolerance.rms_error(np.asarray(state), np.asarray(expected_state)) < 1e-6


@pytest.mark.parametrize(
    ("op", "case", "gpu"),
    [
        ("wkv6", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp", regime="mixed"), "8.9"),
        ("wkv6", Case(1, 200, 1, 64, decay="exp", regime="mixed"), "8.9"),
        ("wkv6", Case(1, 200, 1, 128, dtype="bfloat16", decay="log"), "8.9"),
        ("wkv5", Case(1, 130, 1, 64, dtype="bfloat16", decay="log"), "8.9"),
        ("wkv7", Case(2, 130, 1, 64, dtype="bfloat16"), "8.9"),
        ("wkv7", Case(1, 130, 1, 64, decay="log", regime="mixed"), "8.9"),
        ("wkv7", Case(1, 130, 1, 64, dtype="bfloat16", decay="log", regime="steep"), "8.9"),
        ("wkv7", Case(1, 70, 2, 48, V=24, dtype="float16", decay="exp", regime="mixed"), "8.9"),
        ("wkv7", Case(1, 130, 1, 128, dtype="bfloat16"), "8.9"),
        (KIMI, Case(1, 130, 2, 64, dtype="bfloat16", decay="log"), "8.9"),
        (GATED, Case(1, 130, 2, 128, dtype="bfloat16", decay="log"), "8.0"),
        ("wkv7", Case(1, 130, 1, 128, dtype="float16", decay="exp", regime="mixed"), "8.0"),
    ],
    ids=str,
)
def test_the_same_bits_in_little_shared_memory(
    emulated: Emulation, op: str, case: Case, gpu: str
) -> None:
    """Of several rows, which have segments, and of one without any."""
    rows: dict[str, Any] = {"segment_ids": _ids(case)} if case.B > 1 else {}
    found = []
    for name in ("9.0", gpu):
        emulated.use(Device(1, DEVICES[name].shared_memory))
        found.append(_check(emulated, op, case, seeds=(1,), **rows))
        assert emulated.plans[0]["kernel"] == "matrix units"
    gradients = all(plan["kernel"] == "matrix units" for plan in emulated.plans)
    assert gradients == (case.dtype != "float32" and (case.K < 128 or gpu != "8.9"))
    _assert_same({n: x for n, x in found[0].items() if gradients or n[0] != "d"}, found[1])


def _ids(case: Case, seed: int = 0) -> np.ndarray:
    """Rows of short segments, of long ones, and of padding here and there, at the start and at the
    end; the last row has nothing else."""
    random = np.random.default_rng(seed)
    rows = np.zeros((case.B, case.T), np.int32)
    for row, longest in zip(rows[:-1], (9, 64, 150, 90), strict=False):
        start = 0
        while start < case.T:
            length = random.integers(1, longest)
            row[start : start + length] = random.integers(0, 1 << 10) * (random.random() < 0.8)
            start += length
    return rows


SEGMENTS = [
    ("wkv7", Case(4, 70, 1, 16, decay="exp"), None, 1),
    ("wkv7", Case(4, 133, 1, 32, dtype="float16", decay="log", regime="mixed"), EXACT, 132),
    ("wkv7", Case(2, 135, 1, 64, dtype="bfloat16"), EXACT, 132),
    ("wkv7", Case(2, 37, 1, 128), None, 132),
    ("wkv6", Case(4, 70, 1, 16, decay="exp", regime="mixed"), None, 1),
    ("wkv6", Case(3, 133, 2, 32, dtype="float16", decay="log"), None, 132),
    ("wkv6", Case(2, 37, 1, 128, decay="log"), None, 132),
    ("wkv5", Case(2, 133, 1, 64, decay="log"), EXACT, 132),
    ("wkv4", Case(4, 70, 1, 33, decay="log"), None, 1),
    ("wkv4", Case(5, 200, 1, 64, decay="exp", regime="mixed"), None, 132),
    ("wkv4", Case(4, 320, 1, 66, dtype="bfloat16", decay="log"), None, 12),
    ("wkv4", Case(4, 133, 1, 35, dtype="float16", decay="exp"), None, 4),
    ("wkv4", Case(2, 4170, 1, 4, decay="log"), None, 1),
]


@pytest.mark.parametrize(("op", "case", "precision", "multiprocessors"), SEGMENTS, ids=str)
def test_segments(
    emulated: Emulation, op: str, case: Case, precision: str | None, multiprocessors: int
) -> None:
    """What is not finite in padding, or in another segment, reaches nothing."""
    emulated.use(Device(multiprocessors))
    own, ids = OPERATORS[op], _ids(case)
    options: dict[str, Any] = {"precision": precision, "segment_ids": ids}
    found = _check(emulated, op, case, **options)
    assert not emulated.on_matrix_units

    poisoned = np.zeros(ids.shape, bool)
    for row, parts in enumerate(map(harness.segments_of, ids)):
        if len(parts) > 2:
            poisoned[row, parts[len(parts) // 2]] = True
    inputs, cotangents = harness.operands(op, case, segment_ids=ids)
    for i, x in enumerate((*(inputs[name] for name in own.timed), cotangents["dy"])):
        x[poisoned] = (np.inf, np.nan)[i % 2]
    others = _found(emulated, op, inputs, cotangents, decay=case.decay, **options)
    for name in found.keys() - {f"d{n}" for n in own.shared}:
        kept = ~poisoned if found[name].shape[1] == case.T else ...
        assert found[name][kept].tobytes() == others[name][kept].tobytes(), name


IDS = np.array(
    [
        [1] * 5 + [2] * 60 + [1] * 40 + [3] * 25,
        [0] * 3 + [4] * 20 + [0] * 10 + [4] * 31 + [9] * 16 + [5, 6, 7] * 12 + [0] * 14,
    ]
)
"""The segments of rows of 130 tokens."""


@pytest.mark.parametrize(
    ("op", "case", "multiprocessors"),
    [
        ("wkv7", Case(2, 130, 1, 64, dtype="bfloat16"), 1),
        ("wkv7", Case(2, 130, 1, 64, dtype="float16", decay="log", regime="mixed"), 132),
        ("wkv7", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp", regime="steep"), 132),
        ("wkv7", Case(1, 81, 1, 128, dtype="bfloat16"), 132),
        ("wkv7", Case(2, 130, 1, 64, decay="log", regime="mixed"), 1),
        ("wkv7", Case(2, 130, 1, 64, decay="exp", regime="steep"), 132),
        ("wkv7", Case(2, 130, 2, 32, V=48, dtype="bfloat16"), 132),
        ("wkv7", Case(2, 130, 1, 64, V=128, dtype="bfloat16"), 132),
        ("wkv7", Case(1, 81, 2, 72, V=64, dtype="float16", decay="exp", regime="steep"), 1),
        (GATED, Case(2, 130, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), 1),
        (KIMI, Case(2, 130, 1, 64, dtype="bfloat16", decay="log"), 132),
        (KIMI, Case(2, 130, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), 1),
        (KIMI, Case(2, 81, 2, 128, dtype="float16", decay="log", regime="mixed"), 1),
        ("wkv6", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), 1),
        ("wkv6", Case(2, 130, 1, 64, dtype="bfloat16", decay="log", regime="mixed"), 2),
        ("wkv5", Case(2, 130, 1, 64, dtype="bfloat16", decay="exp"), 2),
        ("wkv6", Case(2, 130, 1, 64, decay="log", regime="mixed"), 132),
        ("wkv5", Case(2, 130, 1, 64, decay="exp", regime="mixed"), 2),
        ("wkv6", Case(2, 130, 1, 128, dtype="bfloat16", decay="log", regime="mixed"), 132),
        ("wkv5", Case(2, 130, 1, 128, dtype="float16", decay="exp"), 1),
    ],
    ids=str,
)
def test_segments_on_matrix_units(
    emulated: Emulation, op: str, case: Case, multiprocessors: int
) -> None:
    """What is not finite in padding reaches nothing."""
    emulated.use(Device(multiprocessors))
    ids = IDS[: case.B, : case.T]
    _check(emulated, op, case, segment_ids=ids)
    assert emulated.on_matrix_units


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_makes_no_chunk_less_steep(emulated: Emulation, dtype: str) -> None:
    """Nor does it matter among how many blocks a chunk that is steep is divided."""
    case, found = Case(2, 64, 1, 64, dtype=dtype, decay="log", regime="near 0"), []
    for multiprocessors in (1, 132):
        emulated.use(Device(multiprocessors))
        ids = np.array([4 * ([1] + 15 * [0]), 64 * [1]])
        found.append(_check(emulated, "wkv7", case, segment_ids=ids))
    _assert_same(*found)


def test_a_fast_token_among_slow_ones(emulated: Emulation) -> None:
    """With "exp" the gradient of its decay is multiplied by its decay: what rounding leaves of the
    pairs of tokens that cancel in it must not show."""
    case = Case(1, 64, 1, 64, decay="exp")
    inputs, cotangents = harness.operands("wkv6", case)
    inputs["w"][:] = np.log(0.05 * np.log(2))
    inputs["w"][:, 5::16] = np.log(40 * np.log(2))
    found = _found(emulated, "wkv6", inputs, cotangents, decay="exp", precision=None)
    expected = harness.expected("wkv6", inputs, cotangents, decay="exp")
    tolerance.assert_close({"dw": found["dw"]}, {"dw": expected["dw"]}, 1e-5)
    assert emulated.on_matrix_units


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 70, 2, 40, V=24, dtype="bfloat16", decay="log", regime="steep"),
        Case(1, 70, 2, 64, V=96, dtype="float16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("other", [0, 1])
def test_a_head_reads_no_other(emulated: Emulation, case: Case, other: int) -> None:
    """Kernels for more channels than a head has read nothing of the head before it or after it."""
    emulated.use(Device(132))
    inputs, cotangents = harness.operands("wkv7", case)
    options = {"decay": case.decay, "precision": None}
    found = _found(emulated, "wkv7", inputs, cotangents, **options)

    def head(name: str, x: np.ndarray, number: int) -> np.ndarray:
        return x[:, number] if "state" in name else x[:, :, number]

    for arrays in (inputs, cotangents):
        for name, x in arrays.items():
            head(name, x, other)[:] = np.nan
    others = _found(emulated, "wkv7", inputs, cotangents, **options)
    for name in found:
        one, two = (head(name, arrays[name], 1 - other) for arrays in (found, others))
        assert one.tobytes() == two.tobytes(), name
    assert emulated.on_matrix_units


@pytest.mark.parametrize(("keys", "device"), [(96, "8.9"), (20, "9.0")])
def test_head_sizes_of_matrix_units_alone(emulated: Emulation, keys: int, device: str) -> None:
    """Where the kernels on matrix units do not take a call that no others take, it says why."""
    emulated.use(DEVICES[device])
    inputs, _ = harness.operands("wkv7", Case(1, 70, 1, keys, V=48, dtype="bfloat16"))
    given = [inputs[name] for name in OPERATORS["wkv7"].inputs]
    reason = rwkv_jax.implementations("wkv7", *given, platform="cuda")["ffi"].reason
    why = "multiples of 8" if keys == 20 else "shared memory"
    assert reason is not None
    assert f"K = {keys} and V = 48" in reason
    assert why in reason


@pytest.mark.parametrize(
    ("op", "case", "keys", "values"),
    [
        (GATED, Case(1, 32, 4, 64, dtype="bfloat16", decay="log"), 2, (4, 64)),
        (KIMI, Case(1, 32, 4, 64, V=128, dtype="bfloat16", decay="log"), 2, (8, 64)),
        ("wkv7", Case(1, 32, 2, 64, V=128, dtype="bfloat16"), 2, (4, 64)),
        ("wkv7", Case(1, 32, 2, 128, V=256, dtype="bfloat16"), 2, (4, 128)),
        ("wkv7", Case(1, 32, 2, 64, V=120, dtype="bfloat16"), 2, (2, 120)),
    ],
    ids=str,
)
def test_heads_that_share_keys(
    emulation: Emulation, op: str, case: Case, keys: int, values: tuple[int, int]
) -> None:
    """Kernels get keys as callers give them, and values as heads that they have kernels for."""
    inputs, cotangents = harness.operands(op, case)
    passes = functools.partial(harness.value_and_gradients, Run(op, "ffi"), precision=None)
    forward, backward = emulation.traced(passes, inputs, cotangents)
    for call in (forward, backward):
        shapes = [x.shape for x in call.operands]
        assert shapes[0] == (case.B, case.T, keys, case.K)
        assert (case.B, case.T, *values) in shapes


def test_key_heads_that_cannot_be_shared(emulation: Emulation) -> None:
    """The handler refuses them, too."""
    case = Case(1, 32, 4, 64, dtype="bfloat16", decay="log")
    inputs, cotangents = harness.operands(GATED, case)
    run = functools.partial(harness.value_and_gradients, Run(GATED, "ffi"))
    for call in emulation.traced(functools.partial(run, precision=None), inputs, cotangents):
        given, made = (
            [np.zeros((1, 32, 3, 64) if x.shape == (1, 32, 2, 64) else x.shape, x.dtype) for x in y]
            for y in (call.operands, call.results)
        )
        with pytest.raises(RuntimeError, match="G = 3 and H = 4; expected an H that is a multiple"):
            emulation.module.call(call.target, given, made, call.attributes)


def test_wkv4_jumps(emulated: Emulation) -> None:
    """Keys whose weights, next to each other in one segment or in two, are out of the range of
    float32."""
    case = Case(5, 200, 1, 16, decay="log", regime="near 1")
    ids, random = _ids(case), np.random.default_rng(0)
    inputs, cotangents = harness.operands("wkv4", case)
    jumps = random.choice([0, 0, -90, 90], (case.B, case.T // 5, case.K))
    inputs["k"] += np.repeat(np.float32(jumps), 5, axis=1)
    options = {"decay": case.decay, "segment_ids": ids}
    found = _found(emulated, "wkv4", inputs, cotangents, **options)
    harness.assert_right(found, harness.expected("wkv4", inputs, cotangents, **options), 1e-4)


@pytest.mark.parametrize("marked", [False, True])
def test_wkv4_without_weight(emulated: Emulation, marked: bool) -> None:
    """Keys of -inf, of a whole run of tokens too."""
    case = Case(1, 100, 1, 16, decay="log")
    ids = np.ones((1, case.T), np.int32)
    ids[:, 90:] = 2
    options = {"decay": case.decay, **({"segment_ids": ids} if marked else {})}
    inputs, cotangents = harness.operands("wkv4", case)
    emulated.use(Device(1))
    inputs["k"][:, 13:45] = -np.inf
    found = _found(emulated, "wkv4", inputs, cotangents, **options)
    inputs["k"][:, 13:45] = -1e4
    harness.assert_right(found, harness.expected("wkv4", inputs, cotangents, **options))


SEVERAL = [
    ("wkv7", Case(1, 300, 1, 16, decay="exp", regime="mixed"), 1, 1, None),
    ("wkv7", Case(1, 300, 1, 32, dtype="float16", decay="log"), 132, 0.3, None),
    ("wkv6", Case(1, 300, 2, 16, decay="exp", regime="mixed"), 1, 0.3, None),
    ("wkv6", Case(1, 300, 1, 32, dtype="bfloat16", decay="log"), 132, 1, None),
    ("wkv5", Case(1, 300, 1, 32, decay="log"), 132, 1, None),
    ("wkv4", Case(1, 300, 1, 40, decay="log", regime="mixed"), 28, 1, None),
    ("wkv4", Case(1, 300, 1, 66, dtype="bfloat16", decay="exp"), 21, 1, None),
    ("wkv7", Case(1, 300, 1, 64, dtype="float16"), 132, 0.6, None),
    ("wkv7", Case(1, 200, 1, 64, decay="log"), 132, 1, None),
    ("wkv7", Case(1, 200, 1, 128, dtype="bfloat16"), 4, 1, None),
    ("wkv7", Case(1, 300, 1, 64, V=128, dtype="bfloat16"), 132, 1, None),
    ("wkv7", Case(1, 200, 2, 40, V=16, dtype="float16", decay="log", regime="mixed"), 1, 1, None),
    (GATED, Case(1, 200, 2, 128, dtype="bfloat16", decay="log"), 1, 1, None),
    (GATED, Case(1, 200, 4, 64, dtype="float16", decay="log"), 132, 1, None),
    (KIMI, Case(1, 200, 2, 64, dtype="bfloat16", decay="log"), 132, 1, None),
    ("wkv6", Case(1, 200, 2, 64, dtype="bfloat16", decay="log", regime="mixed"), 1, 1, None),
    ("wkv5", Case(1, 300, 1, 64, dtype="bfloat16", decay="log"), 1, 1, None),
    ("wkv6", Case(1, 300, 1, 64, decay="exp"), 132, 1, None),
    ("wkv6", Case(1, 200, 1, 128, dtype="bfloat16", decay="log", regime="mixed"), 2, 1, None),
    *(
        (op, case, 1 + 131 * seed, 1, seed)
        for seed in range(2)
        for op, case in [
            ("wkv7", Case(1, 200, 1, 16, decay="exp")),
            ("wkv6", Case(1, 200, 1, 16, decay="log")),
            ("wkv4", Case(1, 200, 1, 16, decay="log")),
            ("wkv7", Case(1, 200, 1, 64, dtype="bfloat16")),
            ("wkv6", Case(1, 200, 1, 64, dtype="bfloat16", decay="exp")),
        ]
    ),
]
"""Each with the number of multiprocessors, the share of scratch, and the seed of random offsets."""


@pytest.mark.parametrize(("op", "case", "multiprocessors", "share", "seed"), SEVERAL, ids=str)
def test_sequences(
    emulated: Emulation,
    monkeypatch: pytest.MonkeyPatch,
    op: str,
    case: Case,
    multiprocessors: int,
    share: float,
    seed: int | None,
) -> None:
    """Sequences of different lengths in a row, to which its first and last tokens do not belong.
    Random offsets, of any size in any order, are those that they are clamped to. Which sequence
    runs first makes no difference."""
    emulated.use(Device(multiprocessors), share)
    cu = np.minimum(CU_SEQLENS + 3, case.T - 2)
    if seed is not None:
        random = np.random.default_rng(seed)
        sizes = random.choice([10, 300, 1 << 31], 6)
        cu = np.array([random.integers(-size, size) for size in sizes], np.int32)
    internals.take_longest_first(monkeypatch, False)
    found = _check(emulated, op, case, seeds=[1], cu_seqlens=cu)
    internals.take_longest_first(monkeypatch, True)
    _assert_same(found, _check(emulated, op, case, seeds=[2], cu_seqlens=cu))


ROWS: dict[str, dict[str, Any]] = {
    "alone": {},
    "segments": {"segment_ids": np.repeat(np.array([[3, 0, 4, 5]]), [20, 9, 21, 20], axis=1)},
    "sequences": {"cu_seqlens": np.array([0, 3, 3, 67, 70], np.int32)},
}
TRANSITIONS = [
    ("wkv7", Case(1, 70, 2, 64, dtype="bfloat16"), "alone"),
    ("wkv7", Case(2, 16, 1, 128, dtype="float16"), "alone"),
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "segments"),
    ("wkv7", Case(1, 70, 2, 24, V=96, dtype="bfloat16", decay="log"), "alone"),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log"), "segments"),
    ("wkv5", Case(1, 70, 1, 64, dtype="float16", decay="exp"), "alone"),
    ("wkv6", Case(1, 70, 1, 64, decay="exp"), "segments"),
    ("wkv6", Case(1, 70, 2, 128, dtype="bfloat16", decay="log"), "segments"),
]


@pytest.mark.parametrize(
    ("device", "op", "case", "rows"),
    [
        (device, *call)
        for device, call in itertools.product(DEVICES, TRANSITIONS)
        # K and V that differ are for GPUs with enough shared memory for all passes.
        if call[1].V is None or device in ("9.0", "10.0")
    ],
    ids=str,
)
def test_transitions(emulated: Emulation, op: str, case: Case, rows: str, device: str) -> None:
    """What all tokens do to a state, and to its gradient, without the state."""
    emulated.use(DEVICES[device])
    inputs, cotangents = harness.operands(op, case, **ROWS[rows])
    packing = None if rows == "alone" else internals.marks_of(**ROWS[rows])
    options = {"decay": case.decay, "implementation": "ffi", "precision": None}
    forward = dataclasses.replace(internals.forward_operands(op, inputs, packing), state={})
    backward = internals.backward_operands(op, inputs, {}, cotangents, packing)
    transition = internals.run_pass(op, "transition", forward, **options)
    reverse = internals.run_pass(op, "reverse_transition", backward, **options)
    assert [plan["kernel"] for plan in emulated.plans] == ["matrix units"] * 2

    limit = functools.partial(tolerance.ceiling, dtype=case.dtype, sequential=False, highest=True)
    for start in (np.zeros_like(inputs["initial_state"]), inputs["initial_state"]):
        state = internals.transition(op).apply(transition, {"state": jnp.asarray(start)})
        found = {"final_state": state["state"], "dinitial_state": reverse["state"]}
        given = inputs | {"initial_state": start}
        right = harness.expected(op, given, cotangents, decay=case.decay, **ROWS[rows])
        harness.assert_right(found, right, {name: limit(name) for name in found})


ON_DEVICES = [
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "alone"),
    ("wkv7", Case(1, 70, 1, 64, dtype="bfloat16"), "sequences"),
    ("wkv7", Case(1, 70, 1, 128, dtype="bfloat16"), "segments"),
    ("wkv7", Case(1, 9, 1, 128), "alone"),
    ("wkv7", Case(1, 70, 1, 32, dtype="bfloat16"), "alone"),
    ("wkv6", Case(1, 70, 1, 64, dtype="bfloat16", decay="log"), "sequences"),
    ("wkv6", Case(1, 70, 1, 64, decay="log"), "alone"),
    ("wkv6", Case(1, 9, 1, 128, decay="log"), "alone"),
    ("wkv6", Case(1, 70, 1, 128, decay="exp"), "segments"),
    ("wkv6", Case(1, 70, 1, 128, dtype="bfloat16", decay="log"), "alone"),
    ("wkv5", Case(1, 70, 1, 128, dtype="bfloat16", decay="exp"), "segments"),
    ("wkv4", Case(1, 70, 1, 33, decay="log"), "alone"),
    ("wkv7_step", Case(1, 1, 1, 128, dtype="bfloat16"), "alone"),
    ("wkv5_step", Case(1, 1, 1, 64, decay="log"), "alone"),
    ("wkv4_step", Case(1, 1, 1, 33, decay="log"), "alone"),
]
"""Of 70 tokens each, so that there are two chunks, where kernels on matrix units may take them."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case", "rows"), ON_DEVICES, ids=str)
def test_devices(emulated: Emulation, op: str, case: Case, rows: str, device: str) -> None:
    """Every device runs every call."""
    emulated.use(DEVICES[device])
    _check(emulated, op, case, seeds=[1], **ROWS[rows])
    assert emulated.plans


Layer = layer_functions.Case

LAYERS = [
    *(
        ("9.0", "norm_shift_mix", Layer(*case))
        for case in [
            (2, 70, 1, 48, "float32", 6, True),
            (1, 129, 1, 16, "float16", 1, True),
            (1, 66, 1, 320, "bfloat16", 6),
            (1, 67, 1, 768, "bfloat16", 6, True),
            (1, 17, 1, 2048, "bfloat16", 6),
            (1, 9, 1, 2048, "float32", 6, True),
            (1, 5, 1, 2560, "bfloat16", 6, True),
            (2, 3, 1, 4096, "bfloat16", 6, True),
            (1, 9, 1, 4096, "float32", 6),
            (1, 1, 1, 48, "float32", 6),
            (2, 64, 1, 64, "bfloat16", 6),
            (2, 0, 1, 32, "bfloat16", 6),
            (0, 5, 1, 32, "float32", 1),
        ]
    ),
    *(
        ("9.0", name, Layer(*case))
        for name in ELEMENTWISE
        if name != "norm_shift_mix"
        for case in [
            (2, 70, 3, 16, "float32"),
            (1, 130, 1, 128, "float16"),
            (2, 65, 5, 64, "bfloat16"),
            (1, 17, 9, 256, "float16"),
            (1, 2, 40, 64, "bfloat16"),
            (3, 1, 1, 16, "bfloat16"),
            (2, 0, 2, 64, "bfloat16"),
            (0, 5, 2, 64, "float32"),
        ]
    ),
    *(
        (device, name, case)
        for device in DEVICES
        for name, case in [
            *((name, Layer(1, 70, 2, 64, "bfloat16", origin=True)) for name in ELEMENTWISE),
            ("norm_shift_mix", Layer(1, 3, 1, 2048, "bfloat16")),
            ("norm_shift_mix", Layer(1, 2, 1, 4096, mixes=1)),
        ]
    ),
]
"""Rows, tokens, heads, channels of each, and for `norm_shift_mix` the mixes and whether `origin` is
given. Some have fewer channels than a warp takes, or more than a block. Some devices have no room
to copy wide tokens ahead."""


@pytest.mark.parametrize(("device", "name", "case"), LAYERS, ids=str)
def test_layers(emulated: Emulation, device: str, name: str, case: Layer) -> None:
    """Results and gradients are close to those of the oracle, and the same for all seeds."""
    emulated.use(DEVICES[device])

    def found(seed: int) -> dict[str, np.ndarray]:
        emulated.module.seed(seed)
        every = layer_functions.check(name, "ffi", case, _variant(LAYER_FUNCTIONS[name].call))
        return {n: np.asarray(x) for n, x in every.items()}

    _assert_same(found(1), found(2))


@pytest.mark.parametrize("name", ["norm_shift_mix", "read_out"])
def test_tokens_over_devices(emulated: Emulation, name: str, cpus: list[Any]) -> None:
    """Of which the kernels get those of one device each."""
    mesh = meshes.mesh("data=2,seq=2", AxisType.Explicit, cpus)
    case, where = Layer(2, 130, 2, 16, origin=True), {"B": "data", "T": "seq"}
    specs = {n: P(*map(where.get, x)) for n, x in LAYER_FUNCTIONS[name].axes.items()}
    arrays = layer_functions.operands(name, case)
    placed = [meshes.put(mesh, specs, x) for x in arrays]
    call = _variant(LAYER_FUNCTIONS[name].call)
    found = layer_functions.value_and_gradients(name, "ffi", *placed, function=call)
    right = layer_functions.expected(name, *arrays)
    layer_functions.assert_right(name, found, right, case.dtype)
    assert len(emulated.files) == 2


TWO_IN_ONE = [
    ("9.0", "keyed_wkv7", Layer(1, 1, 2, 64, "bfloat16"), False),
    ("9.0", "keyed_wkv7", Layer(1, 64, 1, 64, "bfloat16", without=("initial_state",)), False),
    ("9.0", "keyed_wkv7", Layer(3, 65, 1, 64, "bfloat16"), False),
    ("9.0", "keyed_wkv7", Layer(1, 130, 2, 64, "float16"), False),
    ("9.0", "keyed_wkv7", Layer(2, 130, 1, 64, "bfloat16"), True),
    ("9.0", "keyed_wkv7", Layer(0, 65, 2, 64, "bfloat16"), False),
    ("9.0", "keyed_wkv7", Layer(2, 0, 2, 64, "bfloat16"), False),
    ("8.0", "keyed_wkv7", Layer(1, 70, 2, 64, "bfloat16"), False),
    ("8.9", "keyed_wkv7", Layer(2, 130, 1, 64, "float16"), True),
    ("9.0", "projected_read_out", Layer(2, 70, 3, 16, "float32"), False),
    ("9.0", "projected_read_out", Layer(2, 65, 5, 64, "bfloat16"), False),
    ("9.0", "projected_read_out", Layer(1, 3, 9, 256, "float16"), False),
    ("9.0", "projected_read_out", Layer(3, 1, 1, 64, "bfloat16"), False),
    ("9.0", "projected_read_out", Layer(2, 0, 2, 64, "bfloat16"), False),
]
"""Each with a device and whether the rows have the segments of IDS."""


@pytest.mark.parametrize(("device", "name", "case", "marked"), TWO_IN_ONE, ids=str)
def test_two_functions_in_one(
    emulated: Emulation, device: str, name: str, case: Layer, marked: bool
) -> None:
    """Results and gradients are, bit for bit, those of one function after the other, but for the
    parameters of `keyed_wkv7`, whose gradients are summed in another order. For a few tokens that
    calls both functions."""
    emulated.use(DEVICES[device])
    own, keyed = LAYER_FUNCTIONS[name], name == "keyed_wkv7"
    inputs, cotangents = layer_functions.operands(name, case)
    inputs |= {"segment_ids": IDS} if marked else {}

    def found(function: Any, seed: int) -> dict[str, np.ndarray]:
        emulated.module.seed(seed)
        every = layer_functions.value_and_gradients(
            name, "ffi", inputs, cotangents, function=function
        )
        return {name: np.asarray(x) for name, x in every.items()}

    # Functions of their own in JAX's caches, which know no device.
    one, two = (functools.partial(x) for x in (own.call, layer_functions.IN_TWO[name]))
    (fused, other), apart = (found(one, seed) for seed in (1, 2)), found(two, 1)
    right = layer_functions.expected(name, inputs, cotangents)
    layer_functions.assert_right(name, fused, right, case.dtype)
    _assert_same(fused, other)
    sums = {f"d{name}" for name in own.parameters if keyed}
    _assert_same({n: x for n, x in fused.items() if n not in sums}, apart)
    tolerance.assert_close({n: fused[n] for n in sums}, {n: apart[n] for n in sums}, 1e-6)
    if 0 in (case.B, case.T):
        return
    if not keyed:
        assert {*internals.projected_read_out.RESTORING.targets} <= emulated.files.keys()
        return
    files = [emulated.files.get(x) for x in internals.keyed_wkv7.TARGETS.values()]
    of_both = [{"wkv7_keys.cu", "scan.cu"}, {"scan.cu", "gradients.cu"}]
    assert files == (of_both if case.T >= 16 else [None, None])


def test_targets_and_constants_are_those_of_python(emulated: Emulation) -> None:
    names = ("fwd", "bwd", "step", "transition", "reverse_transition")
    found = set(emulated.module.targets())
    assert found >= set().union(*(internals.targets(op, *names[:3]) for op in SEQUENCES))
    of_operators = (internals.targets(op, *names) for op in SEQUENCES)
    assert found.difference(*of_operators) == internals.other_targets()
    constants = emulated.module.layer_constants()
    assert constants == pytest.approx(internals.layer_constants(), rel=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("vocabulary", "device"), [(8, "9.0"), (1000, "9.0"), (16392, "9.0"), (32776, "12.0")]
)
def test_cross_entropy(emulated: Emulation, vocabulary: int, device: str, dtype: str) -> None:
    """Losses and gradients of logits. The last vocabulary has logits that shared memory has no room
    for; one token does not count, one has a target outside the vocabulary, and the largest logit of
    one stands twice."""
    emulated.use(DEVICES[device])
    emulated.module.seed(1)
    generator = np.random.default_rng(vocabulary)
    logits = (3 * generator.standard_normal((4, vocabulary))).astype(np.float32)
    logits[2, [1, 5]] = logits.max() + 1
    targets = generator.integers(0, vocabulary, 4).astype(np.int32)
    targets[3] = vocabulary
    scale = np.array([1.0, 0.0, 0.25, 0.5], np.float32)
    z_loss, l2_wrap = 0.02, 0.03
    loss, dlogits = np.zeros(4, np.float32), np.zeros(logits.shape, jnp.dtype(dtype))
    coefficients = np.array([z_loss, l2_wrap], np.float32)
    operands = [logits, targets, scale, coefficients]
    emulated.module.call("rwkv_cross_entropy_v1", operands, [loss, dlogits], {})

    z = logits.astype(np.float64)
    log_sum = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    expected = np.exp(z - log_sum[:, None]) * (1 + 2 * z_loss * log_sum[:, None])
    expected[np.arange(3), targets[:3]] -= 1
    expected[np.arange(4), z.argmax(1)] += l2_wrap * z.max(1)
    losses = log_sum[:3] - z[np.arange(3), targets[:3]] + z_loss * log_sum[:3] ** 2
    np.testing.assert_allclose(loss[:3], losses * scale[:3], rtol=1e-5)
    assert np.isnan(loss[3])
    wrong = tolerance.rms_error(dlogits.astype(np.float32), expected * scale[:, None])
    assert wrong < {"float32": 1e-5}.get(dtype, 3e-3)


@functools.cache
def _step(device: Device, dtype: Any, kernels: str | None) -> Any:
    """The model as one program, in which a device has its scratch."""
    return jax.jit(functools.partial(rwkv7.apply, dtype=dtype, kernels=kernels))


def _decode(
    blocks: Emulation, params: rwkv7.Params, tokens: np.ndarray, kernels: str | None = "fused"
) -> tuple[np.ndarray, Any]:
    """The logits after each token of the rows [B, T], and the state after the last one."""
    dtype = params.emb.weight.dtype
    state = rwkv7.initial_state(params, len(tokens), dtype)
    step, found = _step(blocks.gpu, dtype, kernels), []
    for token in tokens.T:
        logits, state = step(params, jnp.asarray(token), state)
        found.append(np.asarray(logits))
    return np.stack(found, axis=1), state


def _tokens(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).integers(0, 11, (rows, 2), np.int32)


def _with_high_ranks(params: rwkv7.Params) -> rwkv7.Params:
    """The same model with low-rank maps of eight times the rank."""

    def higher(path: Any, x: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if len(name) != 2 or name[1] not in "12":
            return x
        return jnp.tile(x, (1, 8)) if name[1] == "1" else jnp.tile(x / 8, (8, 1))

    return jax.tree_util.tree_map_with_path(higher, params)


def _with_large_mean(params: rwkv7.Params) -> rwkv7.Params:
    """Activations have a mean of 64."""
    first, *others = params.blocks
    assert first.ln0 is not None
    first = first._replace(ln0=first.ln0._replace(bias=first.ln0.bias + 64))
    return params._replace(blocks=(first, *others))


CHANGES = {
    "int8": all_models.quantize,
    "high ranks": _with_high_ranks,
    "large mean": _with_large_mean,
    "": lambda params: params,
}

BLOCKS = [
    (320, 3, "float32", DEVICES["12.0"], ""),
    (384, 8, "float32", DEVICES["8.9"], ""),
    (256, 1, "float32", Device(1), ""),
    (128, 19, "float32", DEVICES["9.0"], ""),
    (1024, 1, "bfloat16", DEVICES["10.0"], ""),
    (256, 1, "float16", Device(3, 101376), ""),
    (320, 3, "float16", Device(1), ""),
    (256, 8, "bfloat16", Device(3, 101376), ""),
    (128, 9, "float16", DEVICES["8.0"], ""),
    (320, 16, "bfloat16", DEVICES["12.0"], ""),
    (192, 31, "bfloat16", Device(5), ""),
    (128, 32, "float16", DEVICES["10.0"], ""),
    (320, 1, "float32", DEVICES["9.0"], "int8"),
    (576, 1, "bfloat16", DEVICES["9.0"], "int8"),
    (128, 1, "float16", Device(3, 101376), "int8"),
    (128, 1, "float32", DEVICES["8.9"], "high ranks"),
    (128, 4, "bfloat16", DEVICES["8.9"], "high ranks"),
    (128, 1, "float32", DEVICES["8.9"], "large mean"),
]
"""Widths, rows, dtypes, devices, and how models are unusual. Few multiprocessors mean several
rounds of a block of threads, or, on matrix units, several groups of outputs for it. Little shared
memory means several slices of the inputs, or less that is under way at once, and that there is no
room for high ranks. A large mean is one far larger than the deviation of a row."""


LIMIT_OF_BLOCKS = {"float32": tolerance.EXACT_FLOAT32, "bfloat16": 1e-2, "float16": 2e-3}


def _check_decoding(
    blocks: Emulation, params: rwkv7.Params, rows: int, given: rwkv7.Params | None = None
) -> Any:
    """The state after a few tokens. Logits are close to those of the oracle, and seeds change
    nothing. The kernels may have other parameters that stand for the same."""
    tokens, dtype = _tokens(rows), str(params.emb.weight.dtype)
    wide = jax.tree.map(
        lambda x: rwkv7.Weight(x.wide()) if isinstance(x, rwkv7.Weight) else x,
        params,
        is_leaf=lambda x: isinstance(x, rwkv7.Weight),
    )
    tensors = {n: np.asarray(x, np.float64) for n, x in rwkv7.names(wide).items()}
    oracle = np.stack([language_models.logits("rwkv7", tensors, row) for row in tokens])
    params = given or params
    blocks.module.seed(1)
    found, state = _decode(blocks, params, tokens)
    blocks.module.seed(2)
    assert np.array_equal(_decode(blocks, params, tokens[:, :1])[0], found[:, :1])
    assert tolerance.rms_error(found, oracle) < LIMIT_OF_BLOCKS[dtype]
    return state


@pytest.mark.parametrize(("width", "rows", "dtype", "device", "change"), BLOCKS, ids=str)
def test_blocks(
    blocks: Emulation, width: int, rows: int, dtype: str, device: Device, change: str
) -> None:
    """Results are those of the oracle, with the matrices that those of int8 stand for. In float32
    the states are close to those of the model, too."""
    blocks.use(device)
    params = CHANGES[change](models.with_heads_of_64(width, dtype))
    state = _check_decoding(blocks, params, rows)
    if dtype == "float32" and not change:
        _, expected = _decode(blocks, params, _tokens(rows), kernels=None)
        tolerance.assert_trees_close(state, expected)


BLOCKS_BY_INPUT = [
    ("float32", False, 0, 256, DEVICES["9.0"]),
    ("bfloat16", False, 0, 1088, Device(1)),
    ("float16", False, 0, 64, Device(3, 101376)),
    ("bfloat16", False, 0.9, 320, DEVICES["9.0"]),
    ("float32", False, 1, 64, DEVICES["8.0"]),
    ("bfloat16", False, -1, 192, DEVICES["9.0"]),
    ("bfloat16", True, 0.5, 192, DEVICES["9.0"]),
    ("float16", True, 0, 256, Device(1)),
]
"""The dtype, whether weights are of int8, the share of hidden channels that are made to be zero, or
-1 where none is, widths and devices. Many multiprocessors have fewer columns each."""


@pytest.mark.parametrize(
    ("dtype", "quantised", "zeros", "width", "device"), BLOCKS_BY_INPUT, ids=str
)
def test_blocks_by_input(
    blocks: Emulation, dtype: str, quantised: bool, zeros: float, width: int, device: Device
) -> None:
    """Results are those of the oracle, and of `ffn.value` the inputs that are zero are not read."""
    blocks.use(device)
    rng, params = np.random.default_rng(0), models.with_heads_of_64(width, dtype)
    unread = [rng.random(4 * width) < zeros for _ in params.blocks]

    def changed(block: Any, unread: np.ndarray) -> Any:
        key, norm = block.ffn.key.weight, block.ln2
        if zeros < 0:  # a constant input that all of them multiply by a positive number
            norm = norm._replace(weight=0 * norm.weight, bias=0 * norm.bias + 1)
            key = abs(key)
        key = jnp.where(unread[:, None], 0, key)
        return block._replace(ln2=norm, ffn=block.ffn._replace(key=rwkv7.Weight(key)))

    def poisoned(block: Any, unread: np.ndarray) -> Any:
        value = block.ffn.value
        rows = jnp.where(unread[:, None], jnp.nan, value.by_input).astype(value.by_input.dtype)
        value = value._replace(by_input=rows)
        return block._replace(ffn=block.ffn._replace(value=value))

    params = params._replace(blocks=tuple(map(changed, params.blocks, unread)))
    params = all_models.quantize(params) if quantised else params
    given = all_models.for_decoding(params)
    if not quantised:
        given = given._replace(blocks=tuple(map(poisoned, given.blocks, unread)))
    _check_decoding(blocks, params, 1, given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_a_block_are_independent(blocks: Emulation, dtype: str) -> None:
    """A row has the same bits in any batch and at any place in it, whatever the other rows are. One
    row of 16-bit elements alone does not run on matrix units: it is close. So are rows of float32
    in batches of different sizes on a GPU. Of rows without a token the states stay."""
    params = models.with_heads_of_64(128, dtype)
    rng, x = np.random.default_rng(0), jnp.zeros((32, 128), dtype)
    x, first, state = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        (x, x, rwkv7.initial_state(params, 32, dtype)[1]),
    )

    def run(rows: Any, state: Any = state, ids: Any = None) -> list[np.ndarray]:
        operands = jax.tree.map(lambda x: x[np.array(rows)], (x, first, state))
        found = internals.step_block(params.blocks[1], *operands, segment_ids=ids)
        return [np.asarray(x, np.float32) for x in jax.tree.leaves(found)]

    together, limit = run(range(32)), LIMIT_OF_BLOCKS[dtype]
    for rows in ([5], [3, 1], [7, 2, 0, 5, 31], range(15, -1, -1), range(7, 32)):
        exact = not blocks.on_gpu if dtype == "float32" else len(rows) > 1
        for found, expected in zip(run(rows), [x[np.array(rows)] for x in together], strict=True):
            assert tolerance.rms_error(found, expected) < limit, rows
            assert not exact or np.array_equal(found, expected), rows
    broken = run(range(32), jax.tree.map(lambda x: x.at[4].set(np.nan), state))
    assert np.isnan(broken[0][4]).all()
    rest = np.arange(32) != 4
    assert all(np.array_equal(x[rest], y[rest]) for x, y in zip(broken, together, strict=True))
    ids = np.arange(32, dtype=np.int32) % 3
    found, before = run(range(32), ids=jnp.asarray(ids)), jax.tree.leaves(state)
    for x, with_all in zip(found, together, strict=True):
        assert np.array_equal(x[ids != 0], with_all[ids != 0])
    for x, start in zip(found[-len(before) :], before, strict=True):
        assert np.array_equal(x[ids == 0], start[ids == 0].astype(np.float32))


@pytest.mark.parametrize("multiprocessors", [1, 4])
def test_deferred_updates(blocks: Emulation, multiprocessors: int) -> None:
    """With one warp for a head and with several, a loop of any length leaves the states of a step
    at a time: those of the first block bit by bit, whose inputs no logits change. So does one in
    which rows have no token now and then, and NaN in a state stays there."""
    every = internals.MAX_PENDING + 1
    blocks.use(Device(multiprocessors))
    dtype, rows, length = "bfloat16", 5, 2 * every + 3
    params = models.with_heads_of_64(128, dtype)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 11, (length, rows), np.int32)
    ids = (rng.random((length, rows)) < 0.7).astype(np.int32)
    ids[:, 0] = ids[every, 1] = 1
    start = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype),
        rwkv7.initial_state(params, rows, dtype),
    )

    @jax.jit
    def step(state: Any, token: Any, ids: Any, number: Any, last: Any) -> tuple[Any, Any]:
        state = internals.at_step(state, number, last)
        return rwkv7.apply(params, token, state, segment_ids=ids, dtype=dtype, kernels="fused")

    def run(state: Any, count: int) -> tuple[list[np.ndarray], list[Any]]:
        found, states = [], []
        for i in range(count):
            logits, state = step(state, tokens[i], ids[i], jnp.int32(i), jnp.bool(i == count - 1))
            found.append(np.asarray(logits)[ids[i] != 0])
            states.append(internals.flush(state))
        return found, states

    counts = (1, every + 1, every + 3) if multiprocessors == 1 else (2, length)
    limit, (logits, states) = 1e-2, run(start, counts[-1])
    for count in counts:
        expected, expected_state = logits[:count], states[count - 1]
        found, (*_, state) = run(internals.deferred(params, start), count)
        assert tolerance.rms_error(np.concatenate(found), np.concatenate(expected)) < limit
        assert np.array_equal(state[0].att.wkv, expected_state[0].att.wkv)
        for x, y in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
            assert x.dtype == y.dtype
            assert tolerance.rms_error(np.asarray(x), np.asarray(y)) < limit
    # All bits of a NaN that CUDA makes are 1 but for the sign.
    nan = jnp.asarray(np.array([0x7FFFFFFF], np.uint32).view(np.float32))
    wkv = start[0].att.wkv.at[1, 0, 2, 3].set(nan[0])
    broken = (start[0]._replace(att=start[0].att._replace(wkv=wkv)), *start[1:])
    found, _ = run(internals.deferred(params, broken), every + 1)
    present = np.flatnonzero(ids[: every + 1, 1])
    assert all(np.isnan(found[i][1]).all() for i in present)


# What handlers refuse.


class Named(NamedTuple):
    """A call that a handler takes: shapes and dtypes by the names that errors have.

    op: the name at the start of errors.
    aliases: operands that are results as well, with the names of these.
    """

    op: str
    target: str
    operands: dict[str, Any]
    results: dict[str, Any]
    attributes: dict[str, int]
    aliases: Mapping[str, str] = MappingProxyType({})


def _named(emulation: Emulation, call: Call) -> Named:
    """A call with the names that its handler has for arrays that are missing."""
    operands = [np.zeros(x.shape, x.dtype) for x in call.operands]
    results = [np.zeros(x.shape, x.dtype) for x in call.results]
    for i, j in call.aliases.items():
        results[j] = operands[i]

    def missing(operands: list[Any], results: list[Any]) -> tuple[str, str]:
        with pytest.raises(RuntimeError, match="is missing") as error:
            emulation.module.call(call.target, operands, results, call.attributes)
        return re.findall(r"INVALID_ARGUMENT: (.+): (.+) is missing", str(error.value))[0]

    op, _ = missing([], [])
    given = {missing(operands[:i], results)[1]: x for i, x in enumerate(call.operands)}
    made = {missing(operands, results[:i])[1]: x for i, x in enumerate(call.results)}
    assert (len(given), len(made)) == (len(operands), len(results))
    aliases = {[*given][i]: [*made][j] for i, j in call.aliases.items()}
    return Named(op, call.target, given, made, call.attributes, aliases)


def _of_layer(emulation: Emulation, name: str, direction: str) -> Named:
    keyed = Layer(2, 16, 1, 64, "bfloat16")
    case = keyed if name == "keyed_wkv7" else Layer(2, 3, 2, 16, "bfloat16", origin=True)
    forward, backward = emulation.of_layer(name, case)
    return _named(emulation, forward if direction == "forward" else backward)


def _of_delta_step(emulation: Emulation, op: str) -> Named:
    inputs, _ = DELTA_STEPS[op].make(Case(2, 1, 4, 16, dtype="bfloat16", decay="log"))
    step = functools.partial(getattr(rwkv_jax, op), implementation="ffi")
    return _named(emulation, emulation.traced(lambda named: step(**named), inputs)[0])


def _of_block(emulation: Emulation, kinds: str) -> Named:
    """The step of a block in which every axis that may differ from the others does."""
    first, deferred = "first" in kinds, "deferred" in kinds
    dtype, rows = "bfloat16" if deferred else "float32", 3
    params = models.with_heads_of_64(128, dtype)
    if "int8" in kinds:
        params, rows = all_models.quantize(params), 1
    if "by input" in kinds:
        params, rows = all_models.for_decoding(params), 1
    state = rwkv7.initial_state(params, rows, dtype)
    if deferred:
        state = internals.at_step(internals.deferred(params, state), jnp.int32(0), jnp.bool(False))
    i = 0 if first else 1
    return _named(emulation, emulation.of_block(params.blocks[i], state[i], rows, first=first))


def _made(target: str, operands: Arrays, results: Arrays, **attributes: int) -> Named:
    """A call from shapes, of float32, or shapes with dtypes."""

    def struct(x: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = x if isinstance(x[-1], str) else (x, "float32")
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    given, made = ({n: struct(x) for n, x in arrays.items()} for arrays in (operands, results))
    return Named(target[len("rwkv_") : -len("_v1")], target, given, made, attributes)


def _low_rank_maps() -> Named:
    given, results = {}, {}
    for i, (rank, offset) in enumerate(((8, 16), (24, 0))):
        given |= {f"rows {i}": (2, 3, 16), f"first {i}": (16, rank), f"second {i}": (rank, 16)}
        given |= {f"offset {i}": (offset,)}
        results |= {f"hidden {i}": (2, 3, rank), f"y {i}": (2, 3, 16)}
    narrow = ({n: (x, "bfloat16") for n, x in arrays.items()} for arrays in (given, results))
    return _made("rwkv_low_rank_maps_v1", *narrow, activations=5)


MADE = {
    "cross_entropy": _made(
        "rwkv_cross_entropy_v1",
        {"logits": (2, 16), "targets": ((2,), "int32"), "scale": (2,), "coefficients": (2,)},
        {"loss": (2,), "dlogits": (2, 16)},
    ),
    "low_rank_maps": _low_rank_maps(),
    "head_cross_entropy": _made(
        "rwkv_head_cross_entropy_v1",
        {
            "features": ((257, 64), "bfloat16"),
            "weight": ((512, 64), "bfloat16"),
            "targets": ((257,), "int32"),
            **dict.fromkeys(("of_target", "scale"), (257,)),
            "l2_wrap": (1,),
        },
        {
            **dict.fromkeys(("loss", "factors"), (257,)),
            "exponentials": ((257, 512), "bfloat16"),
            "bases": (257,),
            "again": ((2,), "int32"),
            "statistics": (2, 257, 4),
        },
    ),
}
LAYER_PASSES = [
    *(f"{name} {x}" for name in (*ELEMENTWISE, "keyed_wkv7") for x in ("forward", "backward")),
    "projected_read_out backward",
]
BLOCK_STEPS = [
    *("block, first", "block", "block, first, int8", "block, first, by input"),
    *("block, deferred", "block, int8"),
]


def _call(emulation: Emulation, name: str) -> Named:
    if name == "wkv7_step":
        return _made("rwkv_wkv7_step_v2", {"r": (1, 1, 16)}, {"y": (1, 1, 16)}, decay=2)
    if name in MADE:
        return MADE[name]
    if name in BLOCK_STEPS:
        return _of_block(emulation, name)
    if name in DELTA_STEPS:
        return _of_delta_step(emulation, name)
    return _of_layer(emulation, *name.split())


def _error(emulation: Emulation, call: Named, changes: Mapping[Any, Any]) -> str:
    """What a handler says of a call with changes. A name has another shape or dtype, or sizes for
    some axes; a number is the size of some axes, and a dtype that of some arrays, with other ones
    in their place; "more" names an array that is added to operands or results; "apart" means that
    results are no operands. Attributes are `attributes`."""

    def changed(name: str, x: Any) -> np.ndarray:
        shape, dtype = [changes.get(n, n) for n in x.shape], changes.get(str(x.dtype), x.dtype)
        own = changes.get(name, {})
        if isinstance(own, dict):
            shape = [own.get(axis, size) for axis, size in enumerate(shape)]
        elif isinstance(own, tuple):
            shape = own
        else:
            dtype = own
        return np.zeros(shape, jnp.dtype(dtype))

    def arrays(kind: str) -> dict[str, np.ndarray]:
        more = {"more": np.zeros(1, np.float32)} if changes.get("more") == kind else {}
        return {n: changed(n, x) for n, x in getattr(call, kind).items()} | more

    operands, results = arrays("operands"), arrays("results")
    for n, x in call.aliases.items():
        if not {x, "apart"} & changes.keys():
            results[x] = operands[n]
    given = list(operands.values()), list(results.values())
    attributes = call.attributes | changes.get("attributes", {})
    with pytest.raises(RuntimeError, match=f"INVALID_ARGUMENT: {call.op}: ") as error:
        emulation.module.call(call.target, *given, attributes)
    return str(error.value)


@pytest.mark.parametrize("name", [*LAYER_PASSES, *BLOCK_STEPS, *DELTA_STEPS, *MADE])
def test_wrong_arrays_are_refused(emulated: Emulation, name: str) -> None:
    """Every operand and result that is missing or has another shape or dtype is named."""
    call = _call(emulated, name)
    if name in LAYER_PASSES:
        tensors = [*LAYER_FUNCTIONS[name.split()[0]].tensors]
        forward = name.endswith("forward")
        names = [*(call.operands if forward else call.results)]
        assert names[: len(tensors)] == (tensors if forward else [f"d{n}" for n in tensors])
    for kind in ("operands", "results"):
        arrays = getattr(call, kind)
        for n, x in arrays.items():
            assert f": {n} has shape [1, " in _error(emulated, call, {n: (1, *x.shape)})
            other = "float32" if x.dtype == np.int32 else "int32"
            assert f": {n} is " in _error(emulated, call, {n: other})
            if (n == "scratch" and "wkv7" in call.target) or not x.size:
                continue  # which may be larger, or cannot be longer
            # The first array that has an axis sets its size: a later one is then odd.
            longer = _error(emulated, call, {n: (*x.shape[:-1], 2 * x.shape[-1])})
            assert re.search(rf"\b{re.escape(n)} has ", longer), longer
        more = _error(emulated, call, {"more": kind})
        assert f"{len(arrays) + 1} {kind} given; expected {len(arrays)}" in more


HEADS_OF_32 = {"att.wkv": {3: 32}, "next att.wkv": {3: 32}, "att.r_k": {1: 32}}
THREE_HEADS = {"att.wkv": {1: 3}, "next att.wkv": {1: 3}, "att.r_k": {0: 3}}

HEAD_SIZES = [
    ({16: size}, f"K = {size}; expected a power of two from 16 to 256") for size in (8, 48, 512)
]
KEYED = [
    ({"parameters": {1: 5}}, "parameters has J = 5"),
    ({"attributes": {"decay": 0}}, "decay is 0; expected 2 (sigmoid)"),
    ({64: 32}, "K = 32; expected 64"),
]

WRONG: dict[str, list[tuple[dict[Any, Any], str]]] = {
    "wkv7_step": [({}, "w is missing")],
    "gated_delta_rule_step": [
        ({"attributes": {"decay": 1}}, "decay is 1; expected 0 (log)"),
        ({"q": {1: 3}, "k": {1: 3}}, "G = 3 and H = 4; expected an H that is a multiple of G"),
        ({16: 24}, "K = 24 and V = 24; expected K = V, a power of two from 16 to 128"),
        ({"scale": (2,)}, "scale has J = 2; expected 1"),
    ],
    "norm_shift_mix forward": [
        ({32: 17}, "x has D = 17; expected a multiple of 16"),
        ({32: 4112}, "x has D = 4112; expected a multiple of 16"),
        ({"parameters": {1: 5}}, "parameters has J = 5; expected 3 or 8"),
    ],
    "norm_shift_mix backward": [
        ({"partials": {1: 2}}, "partials has N = 2; expected 1"),
        ({"partials": {2: 7}}, "so J = 7, where parameters has J = 8"),
    ],
    "wkv7_keys forward": [
        ({"parameters": {1: 2}}, "parameters has J = 2; expected 4"),
        *HEAD_SIZES,
    ],
    "value_residual forward": [*HEAD_SIZES],
    "read_out forward": [*HEAD_SIZES],
    "keyed_wkv7 forward": [*KEYED],
    "keyed_wkv7 backward": [
        *KEYED,
        ({16: 15}, "T = 15 on a device with 101376 bytes of shared memory for a block"),
    ],
    "cross_entropy": [({16: 15}, "logits has V = 15; expected a multiple of 8")],
    "low_rank_maps": [
        ({}, "compute capability 9.0 alone"),
        ({"rows 0": "float32"}, "first 0 is BF16 where rows 0 is F32"),
        ({16: 12}, "rows has C = 12; expected a multiple of 8"),
        ({"attributes": {"activations": 9}}, "activations is 9; expected 2 digits"),
        ({"attributes": {"activations": -1}}, "activations is -1; expected 2 digits"),
    ],
    "head_cross_entropy": [
        ({}, "compute capability 9.0 alone"),
        ({"bfloat16": "float16"}, "features are not BF16"),
        ({64: 96}, "features has C = 96; expected a multiple of 64 up to 262144"),
        ({512: 300}, "weight has V = 300; expected a multiple of 256 up to 262144"),
        ({"statistics": {0: 1}}, "statistics has N = 1; expected 2"),
    ],
    "block, first": [
        ({3: 33}, "x has B = 33; expected up to 32 rows"),
        (HEADS_OF_32, "att.wkv has V = 64 and K = 32; expected 64"),
        (THREE_HEADS, "x has C = 128 where att.wkv has H = 3; expected C = H K > 0"),
        ({512: 480}, "ffn.key.weight has F = 480; expected a multiple of 64"),
        ({40: 12}, "att.w1 has a rank of 12; expected a multiple of 8 up to 1024"),
        ({72: 1032}, "att.g1 has a rank of 1032; expected a multiple of 8 up to 1024"),
        ({"scratch": (7,)}, "scratch has X = 7; expected "),
        ({"ffn.key.weight": "int8"}, "S8; expected no S8 where att.receptance.weight is not"),
    ],
    "block, first, int8": [
        ({"ffn.key.weight": "float32"}, "ffn.key.weight is F32; expected S8"),
        ({"ffn.key.scale": "float16"}, "ffn.key.scale is F16; expected F32"),
        ({1: 2}, "x has B = 2 where att.receptance.weight is S8; expected 1 row"),
    ],
    "block, first, by input": [
        ({"ffn.value.by_input": (128, 512)}, "has shape [128, 512], so F = 128, where ffn.key"),
        ({"ffn.value.by_input": "int8"}, "ffn.value.by_input is S8; expected no S8 where att.rec"),
        ({1: 2}, "x has B = 2 where ffn.value is by input; expected 1 row"),
    ],
    "block, deferred": [
        ({"att.wkv.waiting": {2: 2}}, "att.wkv.waiting has N = 2 and U = 5"),
        ({"att.wkv.waiting": {3: 4}}, "att.wkv.waiting has N = 5 and U = 4"),
        ({"att.wkv.schedule": {0: 1}}, "and att.wkv.schedule has P = 1; exp"),
        ({"apart": True}, "att.wkv and att.wkv.waiting lie elsewhere"),
        ({"bfloat16": "float32"}, "x has B = 3 where tokens wait; expected several rows of BF16"),
    ],
}
"""Calls, with changes as `_error` takes them, and what is wrong with them."""


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused(emulated: Emulation, name: str) -> None:
    """Python refuses some of them before. On a device that none of the kernels for compute
    capability 9.0, and few others, can run on."""
    call = _call(emulated, name)
    emulated.use(DEVICES["8.9"])
    for changes, message in WRONG[name]:
        assert message in _error(emulated, call, changes)
