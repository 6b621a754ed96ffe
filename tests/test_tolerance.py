import numpy as np
import pytest

from support import harness, tolerance
from support.cases import Case
from support.operators import Run

pytestmark = pytest.mark.quick

ONES, ZEROS, RISING = np.ones(8), np.zeros(8), np.linspace(1, 2, 1000)
ROUNDED = RISING.astype(np.float16)
ERROR = r"y \(float64\): relative RMS error"

WRONG: list[tuple[np.ndarray, np.ndarray, float, str]] = [
    (np.where(np.arange(8) == 3, np.nan, 1.0), ONES, 1e-2, ERROR),
    (np.full(8, np.inf), ONES, 1e9, ERROR),
    (ZEROS, ONES, 0.5, ERROR),
    (np.full(8, 1.02), ONES, 1e-2, ERROR),
    (np.full(8, 1e-29), ZEROS, 1e-5, f"{ERROR} inf"),
    (ROUNDED.astype(float), RISING, 1e-9, ERROR),
    (np.ones(1), ONES, 1.0, "y has shape"),
]


def test_what_is_close() -> None:
    """The rounding of a result is allowed for, and zeros have to be zeros."""
    tolerance.assert_close({"y": ROUNDED, "z": ZEROS}, {"y": RISING, "z": ZEROS}, 1e-9)
    for x, expected, ceiling, message in WRONG:
        with pytest.raises(AssertionError, match=message):
            tolerance.assert_close({"y": x}, {"y": expected}, ceiling)
    with pytest.raises(AssertionError, match="found are y, z, expected y"):
        tolerance.assert_close({"y": ONES, "z": ONES}, {"y": ONES}, 1.0)


def test_ceilings_follow_from_what_a_test_states() -> None:
    for implementation, dtype, precision, ceiling in (
        ("reference", "float32", None, tolerance.EXACT_FLOAT32),
        ("reference", "bfloat16", None, tolerance.SEQUENTIAL),
        ("ffi", "float32", None, tolerance.EXACT_FLOAT32),
        ("ffi", "bfloat16", None, tolerance.SEQUENTIAL),
        ("xla", "float32", "highest", tolerance.EXACT_FLOAT32),
        ("xla", "float32", None, tolerance.CHUNKED["gradient"]),
        ("xla", "bfloat16", "highest", tolerance.CHUNKED["gradient"]),
    ):
        inputs, _ = harness.operands("wkv7", Case(1, 17, 1, 32, dtype=dtype))
        run, options = Run("wkv7", implementation), {"decay": "sigmoid", "precision": precision}
        assert harness.ceilings(run, inputs, **options)["dr"] == ceiling, (implementation, dtype)
