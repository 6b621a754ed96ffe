"""Low-rank maps: operands, and their formula in numpy float64."""

from typing import Any

import numpy as np

from support import tolerance
from support.cases import DTYPES


def operands(
    dtype: str = "float32",
    tokens: int = 17,
    width: int = 48,
    rank: int = 12,
    rows: int = 2,
    *,
    offset: bool = True,
) -> tuple[dict[str, Any], np.ndarray]:
    rng = np.random.default_rng([rows, tokens, width, rank])
    shapes = {"x": (rows, tokens, width), "first": (width, rank), "second": (rank, width)}
    scales = {"x": 1.0, "first": width**-0.5, "second": rank**-0.5, "offset": 1.0}
    shapes |= {"offset": (width,)} if offset else {}
    inputs = {
        n: (scales[n] * rng.standard_normal(s)).astype(DTYPES[dtype]) for n, s in shapes.items()
    }
    return inputs, rng.standard_normal(shapes["x"]).astype(DTYPES[dtype])


def expected(
    inputs: dict[str, np.ndarray], dy: np.ndarray, activation: str = "identity"
) -> dict[str, np.ndarray]:
    given = {n: np.asarray(a, np.float64) for n, a in inputs.items()}
    x, first, second = (given[n] for n in ("x", "first", "second"))
    dy = np.asarray(dy, np.float64)
    product = x @ first
    hidden, slope = {
        "identity": (product, np.ones_like(product)),
        "tanh": (np.tanh(product), 1 / np.cosh(product) ** 2),
        "sigmoid": (1 / (1 + np.exp(-product)), 1 / (2 + 2 * np.cosh(product))),
    }[activation]
    dproduct = dy @ second.T * slope
    results = {
        "y": hidden @ second + given.get("offset", 0),
        "dx": dproduct @ first.T,
        "dfirst": np.einsum("btc,btr->cr", x, dproduct),
        "dsecond": np.einsum("btr,btc->rc", hidden, dy),
    }
    return results | ({"doffset": dy.sum((0, 1))} if "offset" in given else {})


def assert_right(found: dict[str, Any], right: dict[str, np.ndarray], dtype: str) -> None:
    """The products are rounded to the dtype of `x`."""
    ceiling = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, ceiling)
