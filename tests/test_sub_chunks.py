"""The arithmetic of sub-chunks, on which `xla` rests, and the loops that are left."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from support import internals
from support.cases import CU_SEQLENS, Case
from support.harness import assert_right, check, operands, value_and_gradients
from support.operators import Run

LENGTH, SIZE = 32, 4
RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("decay", "minimize_flops"), [("log", True), ("log", False), ("sigmoid", True)]
)
def test_decays_between_tokens(decay: str, minimize_flops: bool) -> None:
    """Each product of two factors against the sum of the log decays between two tokens: for "log"
    with tokens that forget everything, next to others that forget little."""
    x, y = RNG.standard_normal((2, 1, LENGTH, SIZE)).astype(np.float32)
    rate = RNG.uniform(1e-3, 0.6, x.shape)
    if decay == "log":
        w = -np.where(RNG.random(x.shape) < 0.2, RNG.choice([5.0, 100.0, 1e30], x.shape), rate)
        log_decay = np.maximum(w, -200.0)
    else:
        w = RNG.uniform(-8, 8, x.shape)
        log_decay = -np.exp(-0.5) / (1 + np.exp(-w))
    found = jax.jit(internals.sub_chunk, static_argnums=(0, 1))(
        decay, minimize_flops, w.astype(np.float32), x, y
    )

    log_decay = np.float32(log_decay).astype(np.float64)
    upto = np.cumsum(log_decay, axis=1)
    start = upto - log_decay
    between = start[:, :, None] - upto[:, None]
    earlier = np.tril(np.ones((LENGTH, LENGTH)), -1)[None, :, :, None]
    with np.errstate(over="ignore"):
        weights = np.where(earlier > 0, np.exp(between), 0.0)
    before = np.einsum("bik,bjk,bijk->bij", x, y, weights)
    same_token = np.eye(LENGTH)[None, :, :, None]
    after = np.einsum("bik,bjk,bijk->bij", x * np.exp(log_decay), y, weights)
    after += np.einsum("bik,bjk,bijk->bij", x, y, same_token)
    now = before + np.einsum("bik,bjk,bijk->bij", x + y, y, same_token)
    right = {
        "pairs": np.concatenate([before, after, now], axis=1),
        "before": x * np.exp(start),
        "after": y * np.exp(upto[:, -1:] - upto),
        "stay": np.exp(upto[:, -1]),
    }
    assert_right(found, right)


@pytest.mark.parametrize("minimize_flops", [True, False])
@pytest.mark.parametrize("length", [1, 4, LENGTH, 2 * LENGTH])
def test_inverse(length: int, minimize_flops: bool) -> None:
    """Also of a matrix whose powers are far larger than its inverse. Only what is below the
    diagonal counts."""
    lower = np.tril(np.ones((length, length)), -1)
    matrices = np.stack([-4.0 * lower, lower * RNG.standard_normal(lower.shape) / 4])
    matrices[0] += 4.0 * lower @ np.eye(length, k=-1)
    inverse = functools.partial(internals.inverse_of_sub_chunk, minimize_flops=minimize_flops)
    given = np.where(lower > 0, matrices, np.nan)
    found = jax.jit(inverse)(given.astype(np.float32))
    assert_right({"inverse": found}, {"inverse": np.linalg.inv(np.eye(length) - matrices)})


@pytest.mark.parametrize("tokens", [1, 1000, 4096, 61 * 64, 32768])
def test_groups_have_a_chunk_too_many_only_where_they_must(tokens: int) -> None:
    """To fill up the last chunk group is to copy every operand."""
    for heads in (1, 12, 32):
        count, chunks, used = internals.chunks_of_groups(tokens, heads)
        assert 0 <= chunks - used < chunks / count
        if used & (used - 1) == 0:
            assert chunks == used


@pytest.mark.parametrize("op", ["wkv7", "wkv6", "wkv5"])
@pytest.mark.slow
def test_only_states_go_along_a_loop(op: str) -> None:
    """On a GPU each pass has one loop over chunks, and one over chunk groups where there are
    several."""

    def loops(case: Case, *ends: int) -> int:
        cu = np.array([0, *ends, case.T], np.int32) if ends else None
        packing: Any = {} if cu is None else {"cu_seqlens": cu}
        inputs, cotangents = operands(op, case, **packing)
        traced: Any = value_and_gradients.trace(Run(op, "xla"), inputs, cotangents, **packing)
        return traced.lower(lowering_platforms=("cuda",)).as_text().count("stablehlo.while")

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
@pytest.mark.parametrize(
    ("decay", "regime"), [("sigmoid", "model"), ("sigmoid", "near 0"), ("log", "mixed")]
)
def test_one_product_a_sub_chunk(decay: str, regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Platforms with matrix units have a chain of their own in float32, too. Strong decays need the
    digits of their exponents."""
    internals.use_matrix_units(monkeypatch)
    case = Case(1, int(CU_SEQLENS[-1]), 2, 32, decay=decay, regime=regime)
    check(Run("wkv7", "xla"), case, cu_seqlens=CU_SEQLENS)
