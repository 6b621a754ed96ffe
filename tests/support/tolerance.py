"""How far a result may be from the oracle: the one place with numbers for it."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

EXACT_FLOAT32 = 1e-5
"""Float32 operands with precision HIGHEST, or in a kernel that comes close to it."""

TWO_TERMS = 2e-5
"""Float32 operands on matrix units, as sums of two bfloat16 numbers, with less than HIGHEST."""

SEQUENTIAL = 2e-3
"""A kernel that takes one token at a time, on bfloat16 or float16 operands."""

CHUNKED = {"output": 7e-3, "gradient": 8e-3}
"""A chunked kernel on matrix units, on bfloat16 or float16 operands or with less than HIGHEST."""

PRODUCTS = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}
"""Matrix products one after the other, with results rounded to the dtype."""

VANISHED = 1e-30
"""Root mean square below which an array counts as zeros: the slope of a decay at the extremes lies
under the float32 range, where XLA flushes and a kernel may bound its exponents."""


def ceiling(name: str, dtype: str, *, sequential: bool, highest: bool) -> float:
    """The ceiling for one array; `name` starts with a d where it is a gradient."""
    if sequential:
        return EXACT_FLOAT32 if dtype == "float32" else SEQUENTIAL
    if dtype == "float32" and highest:
        return EXACT_FLOAT32
    return CHUNKED["gradient" if name.startswith("d") else "output"]


def rms_error(x: np.ndarray, expected: np.ndarray) -> float:
    """`||x - expected|| / ||expected||`; 0 where both are zeros, and NaN never compares small."""
    x, expected = np.asarray(x, np.float64), np.asarray(expected, np.float64)
    difference, size = np.linalg.norm(x - expected), np.linalg.norm(expected)
    if difference == 0:
        return 0.0
    return float(difference / size) if size else float("inf")


def assert_close(
    results: Mapping[str, np.ndarray],
    expected: Mapping[str, np.ndarray],
    ceilings: float | Mapping[str, float],
) -> None:
    """Every array of `results` against the one of the same name in `expected`.

    An array may differ by its ceiling times the expected norm, plus what rounding the expected
    values to its own dtype costs.
    """
    assert set(results) == set(expected), (
        f"found are {', '.join(sorted(results))}, expected {', '.join(sorted(expected))}"
    )
    wrong = []
    for name, x in results.items():
        reference = np.asarray(expected[name], np.float64)
        assert x.shape == reference.shape, f"{name} has shape {x.shape}, expected {reference.shape}"
        ceiling = ceilings[name] if isinstance(ceilings, Mapping) else ceilings
        with np.errstate(over="ignore", under="ignore"):
            rounding = np.linalg.norm(reference.astype(x.dtype) - reference)
        size, error = np.linalg.norm(reference), np.linalg.norm(np.float64(x) - reference)
        limit = ceiling * size + rounding + VANISHED * np.sqrt(x.size)
        if not (np.isfinite(limit) and error <= limit):
            wrong.append(
                f"{name} ({x.dtype}): relative RMS error {rms_error(x, reference):.3g}, ceiling "
                f"{ceiling:.3g}; expected norm {size:.3g}, rounding {rounding:.3g}"
            )
    assert not wrong, "; ".join(wrong)


def assert_trees_close(tree: Any, expected: Any, ceiling: float = EXACT_FLOAT32) -> None:
    """As `assert_close`, for trees whose leaves have the same order."""
    paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(tree), strict=True)
    names = [jax.tree_util.keystr(path) for path in paths]
    found, right = (
        {name: np.asarray(x) for name, x in zip(names, several, strict=True)}
        for several in (leaves, jax.tree.leaves(expected))
    )
    assert_close(found, right, ceiling)
