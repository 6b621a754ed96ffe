import numpy as np
import pytest

from support import tolerance

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
    with pytest.raises(AssertionError):
        tolerance.assert_close({"y": np.ones(8), "z": np.ones(8)}, ONES, 1.0)
    with pytest.raises(AssertionError, match="y has shape"):
        tolerance.assert_close({"y": np.ones(1)}, ONES, 1.0)


def test_close_arrays_pass() -> None:
    tolerance.assert_close({"y": np.full(8, 1.001)}, ONES, 1e-2)
    tolerance.assert_close({"y": np.zeros((0, 4))}, {"y": np.zeros((0, 4))}, 1e-5)


def test_the_rounding_of_the_result_is_allowed_for() -> None:
    expected = np.linspace(1, 2, 1000)
    tolerance.assert_close({"y": expected.astype(np.float16)}, {"y": expected}, 1e-9)
    with pytest.raises(AssertionError):
        tolerance.assert_close(
            {"y": expected.astype(np.float16).astype(float)}, {"y": expected}, 1e-9
        )


def test_zeros_have_to_be_zeros() -> None:
    zeros = {"y": np.zeros(8)}
    tolerance.assert_close(zeros, zeros, 1e-5)
    with pytest.raises(AssertionError):
        tolerance.assert_close({"y": np.full(8, 1e-29)}, zeros, 1e-5)
