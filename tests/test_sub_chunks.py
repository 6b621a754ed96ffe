"""The arithmetic of sub-chunks, on which `xla` rests, and the loops that are left."""

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from support import internals
from support.cases import CU_SEQLENS, Case
from support.harness import assert_right, check, operands, value_and_gradients
from support.operators import Run


@pytest.mark.parametrize("minimize_flops", [True, False])
@pytest.mark.parametrize("length", [1, 4, 32, 64])
def test_inverse(length: int, minimize_flops: bool) -> None:
    """Also of a matrix whose powers are far larger than its inverse. Only what is below the
    diagonal counts."""
    rng = np.random.default_rng(0)
    lower = np.tril(np.ones((length, length)), -1)
    matrices = np.stack([-4.0 * lower, lower * rng.standard_normal(lower.shape) / 4])
    matrices[0] += 4.0 * lower @ np.eye(length, k=-1)
    inverse = functools.partial(internals.inverse_of_sub_chunk, minimize_flops=minimize_flops)
    given = np.where(lower > 0, matrices, np.nan)
    found = jax.jit(inverse)(given.astype(np.float32))
    assert_right({"inverse": found}, {"inverse": np.linalg.inv(np.eye(length) - matrices)})


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5"])
@pytest.mark.slow
def test_only_states_go_along_a_loop(op: str) -> None:
    """On a GPU each pass has one loop over chunks, and one over chunk groups where there are
    several, and no operand is copied to fill up the last chunk group."""

    def loops(case: Case, *ends: int) -> int:
        cu = np.array([0, *ends, case.T], np.int32) if ends else None
        packing: Any = {} if cu is None else {"cu_seqlens": cu}
        inputs, cotangents = operands(op, case, **packing)
        traced: Any = value_and_gradients.trace(Run(op, "xla"), inputs, cotangents, **packing)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert ends or not re.search(r"stablehlo\.pad .* high = \[0, [1-9]", text)
        return text.count("stablehlo.while")

    assert loops(Case(1, 1024, 2, 64)) == loops(Case(1, 1024, 2, 64), 100, 400) == 2
    assert loops(Case(8, 8192, 1, 64)) == loops(Case(1, 8192, 8, 64), 100, 400) == 4


@pytest.mark.parametrize(
    ("op", "decay"),
    [
        ("wkv7", "sigmoid"),
        *(
            pytest.param(op, decay, marks=pytest.mark.slow)
            for op, decay in (("wkv7", "log"), ("wkv6", "exp"), ("wkv5", "log"))
        ),
    ],
)
def test_products_on_matrix_units(op: str, decay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 for 16-bit inputs, with decays as in a model, strong, weak and extreme."""
    internals.use_matrix_units(monkeypatch)
    for regime in ("model", "near 0", "near 1", "mixed"):
        case = Case(1, 333, 2, 64, dtype="bfloat16", decay=decay, regime=regime)
        check(Run(op, "xla"), case, precision=None)


def test_products_of_small_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 throughout: rounding saves nothing there, and sums of few products may nearly
    cancel."""
    case = Case(2, 33, 1, 1, 5, dtype="bfloat16")
    inputs, cotangents = operands("wkv7", case)
    run = Run("wkv7", "xla")
    traced: Any = value_and_gradients.trace(run, inputs, cotangents, precision=None)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text().splitlines()
    products = [line for line in lowered if "stablehlo.dot_general" in line]
    assert products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
    internals.use_matrix_units(monkeypatch)
    check(run, case, precision=None)


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "regime"), [("sigmoid", "near 0"), ("log", "mixed")])
def test_one_product_a_sub_chunk(decay: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Platforms with matrix units have a chain of their own in float32, too. Strong decays need the
    digits of their exponents."""
    internals.use_matrix_units(monkeypatch)
    case = Case(1, int(CU_SEQLENS[-1]), 2, 32, decay=decay, regime=regime)
    check(Run("wkv7", "xla"), case, cu_seqlens=CU_SEQLENS)
