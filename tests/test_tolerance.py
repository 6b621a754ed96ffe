import numpy as np
import pytest

from support import harness, tolerance
from support.cases import Case
from support.operators import Run

pytestmark = pytest.mark.quick

ONES = {"y": np.ones(8)}


@pytest.mark.parametrize(
    ("x", "ceiling"),
    [
        (np.where(np.arange(8) == 3, np.nan, 1.0), 1e-2),
        (np.full(8, np.nan), 1e9),
        (np.full(8, np.inf), 1e9),
        (np.zeros(8), 0.5),
        (np.full(8, 1.02), 1e-2),
    ],
    ids=["one NaN", "all NaN", "infinite", "all zeros", "2% off"],
)
def test_wrong_arrays_fail_by_name(x: np.ndarray, ceiling: float) -> None:
    with pytest.raises(AssertionError, match="y \\(float64\\): relative RMS error"):
        tolerance.assert_close({"y": x}, ONES, ceiling)


def test_wrong_names_and_shapes_fail() -> None:
    with pytest.raises(AssertionError, match="found are y, z, expected y"):
        tolerance.assert_close({"y": np.ones(8), "z": np.ones(8)}, ONES, 1.0)
    with pytest.raises(AssertionError, match="y has shape"):
        tolerance.assert_close({"y": np.ones(1)}, ONES, 1.0)


def test_the_rounding_of_the_result_is_allowed_for() -> None:
    expected = np.linspace(1, 2, 1000)
    rounded = expected.astype(np.float16)
    tolerance.assert_close({"y": rounded}, {"y": expected}, 1e-9)
    with pytest.raises(AssertionError, match="y \\(float64\\): relative RMS error"):
        tolerance.assert_close({"y": rounded.astype(float)}, {"y": expected}, 1e-9)


def test_zeros_have_to_be_zeros() -> None:
    zeros = {"y": np.zeros(8)}
    tolerance.assert_close(zeros, zeros, 1e-5)
    with pytest.raises(AssertionError, match="y \\(float64\\): relative RMS error inf"):
        tolerance.assert_close({"y": np.full(8, 1e-29)}, zeros, 1e-5)


@pytest.mark.parametrize(
    ("implementation", "dtype", "precision", "ceiling"),
    [
        ("reference", "float32", None, tolerance.EXACT_FLOAT32),
        ("reference", "bfloat16", None, tolerance.SEQUENTIAL),
        ("ffi", "float32", None, tolerance.EXACT_FLOAT32),
        ("ffi", "bfloat16", None, tolerance.SEQUENTIAL),
        ("xla", "float32", "highest", tolerance.EXACT_FLOAT32),
        ("xla", "float32", None, tolerance.CHUNKED["gradient"]),
        ("xla", "bfloat16", "highest", tolerance.CHUNKED["gradient"]),
    ],
)
def test_ceilings_follow_from_what_a_test_states(
    implementation: str, dtype: str, precision: str | None, ceiling: float
) -> None:
    case = Case(1, 17, 1, 32, dtype=dtype)
    inputs, _ = harness.operands("wkv7", case)
    run, options = Run("wkv7", implementation), {"decay": case.decay, "precision": precision}
    assert harness.ceilings(run, inputs, **options)["dr"] == ceiling
