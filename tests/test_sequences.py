"""`cu_seqlens`: sequences of different lengths in one row, each with its own states."""

import dataclasses
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from rwkv_jax import sharding
from support import hlo, internals, meshes
from support.cases import CU_SEQLENS, Case
from support.harness import assert_right, check, expected, operands, value_and_gradients
from support.operators import FAST, SEQUENCES, Run, available

pytestmark = pytest.mark.quick("run", "op")

TOKENS = 70
"""Tokens of a row: more than a chunk."""

CU = np.array([0, 0, 1, 7, 7, 70, 70], np.int32)
"""Empty sequences at both ends and between, a single token, and one of 63."""


CASE = Case(1, TOKENS, 2, 16)

LONG = [0, 300, 1100]
assert LONG[-1] >= internals.LONG_SEQUENCE * 2


CASES = [
    *(
        pytest.param(
            *(Run(op, name), Case(1, int(CU_SEQLENS[-1]), 2, 16), CU_SEQLENS),
            marks=[pytest.mark.slow] * ((op, name) != ("wkv7", "reference") and name != "ffi"),
            id=f"{op}-{name}",
        )
        for op in SEQUENCES
        for name in available(op, CASE, cu_seqlens=CU)
        if name == "ffi" or op in ("wkv7", "wkv4")
    ),
    # Sequences so long that native kernels take the longest first.
    *(
        pytest.param(run, Case(1, LONG[-1], 1, 16), LONG, id=f"{op}-long")
        for op, run in FAST.items()
    ),
    # In plain XLA, over several chunk groups, with one that goes on from chunk group to chunk
    # group.
    pytest.param(
        *(Run("wkv6", "xla"), Case(1, 1000, 2, 16), [0, 70, 70, 700, 701, 1000]),
        marks=pytest.mark.slow,
        id="slabs",
    ),
    *(
        pytest.param(FAST[op], case, cu, id=f"{op}-{cu}")
        for op in ("wkv7", "wkv4")
        for case, cu in (
            (Case(1, 0, 2, 16), [0]),
            (Case(1, 0, 2, 16), [0, 0, 0]),
            (Case(1, 3, 2, 16), [0, 3]),
            # Sequences that start without a state.
            (dataclasses.replace(CASE, dtype="bfloat16", state=False), CU),
        )
    ),
]


@pytest.mark.parametrize(("run", "case", "cu"), CASES)
def test_sequences_are_as_if_alone(run: Run, case: Case, cu: Any) -> None:
    check(run, case, cu_seqlens=np.array(cu, np.int32))


COUNT = 5
cuts = strategies.lists(strategies.integers(0, TOKENS), min_size=COUNT - 1, max_size=COUNT - 1)
right = cuts.map(lambda several: [0, *sorted(several), TOKENS])
anything = strategies.lists(
    strategies.integers(-5, TOKENS + 5) | strategies.sampled_from([-(2**31), 2**31 - 1]),
    min_size=COUNT + 1,
    max_size=COUNT + 1,
)


@pytest.mark.parametrize("run", FAST.values(), ids=FAST)
@hypothesis.settings(max_examples=20, deadline=None, derandomize=True, database=None)
@hypothesis.given(several=right | anything)
def test_any_lengths(run: Run, several: list[int]) -> None:
    """Offsets that only the device knows are clamped; results for tokens of none are zeros."""
    cu = np.array(several, np.int32)
    inputs, cotangents = operands(run.op, Case(1, TOKENS, 1, 16), cu_seqlens=cu)
    found = value_and_gradients(run, inputs, cotangents, cu_seqlens=cu)
    assert_right(found, expected(run.op, inputs, cotangents, cu_seqlens=cu))


def test_tokens_without_any_sequence() -> None:
    run, cu = FAST["wkv7"], np.zeros(1, np.int32)
    found = value_and_gradients(run, *operands(run.op, CASE, cu_seqlens=cu), cu_seqlens=cu)
    assert all(not np.asarray(x).any() for x in found.values())


@pytest.mark.parametrize(
    ("op", "axis_type", "shard"),
    [
        ("wkv7", AxisType.Auto, False),
        pytest.param("wkv5", AxisType.Explicit, True, marks=pytest.mark.slow),
        pytest.param("wkv4", AxisType.Auto, False, marks=pytest.mark.slow),
    ],
)
def test_heads_over_devices(op: str, axis_type: AxisType, shard: bool, cpus: list[Any]) -> None:
    """By a plain call, and by `sharding.shard`."""
    run, mesh = FAST[op], meshes.mesh("model=2", axis_type, cpus)
    inputs, cotangents = operands(op, Case(1, TOKENS, 4, 16), cu_seqlens=CU)
    axes = internals.axes_of_sequences(op)
    specs = {n: P(*("model" if x in "HC" else None for x in axes[n])) for n in inputs}
    placed = meshes.put(mesh, specs, inputs)
    function = sharding.shard(run.public, mesh, heads="model") if shard else run.public
    compiled = value_and_gradients.lower(
        run, placed, cotangents, function=function, cu_seqlens=CU
    ).compile()
    found = compiled(placed, cotangents, cu_seqlens=CU)
    assert_right(found, expected(op, inputs, cotangents, cu_seqlens=CU))
    if run.implementation == "ffi":
        assert hlo.collectives(compiled.as_text()) == set()


@pytest.mark.parametrize("op", SEQUENCES)
def test_native_kernels_take_sequences(op: str, pretend: Any) -> None:
    """One call of a target in each pass, whatever the lengths are."""
    pretend("cuda", None)
    inputs, cotangents = operands(op, Case(1, TOKENS, 2, 64, dtype="bfloat16"), cu_seqlens=CU)
    with hlo.device("cuda"):
        traced = value_and_gradients.trace(Run(op, "ffi"), inputs, cotangents, cu_seqlens=CU)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert hlo.targets(text) == internals.targets(op, "fwd", "bwd")
    assert "while" not in text
