"""`rwkv_jax.layers.projected_read_out` by the oracle of `read_out`, and how a test calls it.

Arrays are named after the arguments, and the result is `projected`. Its cotangent and the gradient
of an input have a `d` in front.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rwkv_jax import layers
from support import layer_functions, tolerance
from support.cases import DTYPES, Arrays
from support.layer_functions import LAYER_FUNCTIONS, Case

READ_OUT = LAYER_FUNCTIONS["read_out"]
AXES = {**READ_OUT.inputs, "matrix": "DC"}
RESULTS = {"projected": "BTD"}
OUTPUTS = 24


def operands(case: Case, matrix_dtype: str | None = None) -> tuple[Arrays, Arrays]:
    """Inputs, rounded to their dtype, and the cotangent."""
    inputs, _ = layer_functions.operands("read_out", case)
    rng = np.random.default_rng(case.seed)
    width, dtype = case.H * case.K, DTYPES[case.dtype]
    matrix = (width**-0.5 * rng.standard_normal((OUTPUTS, width))).astype(dtype)
    inputs["matrix"] = matrix.astype(matrix_dtype or dtype)
    return inputs, {"dprojected": rng.standard_normal((case.B, case.T, OUTPUTS)).astype(dtype)}


def expected(inputs: Arrays, cotangents: Arrays) -> dict[str, np.ndarray]:
    """The result and the gradients."""
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    matrix, d = wide.pop("matrix"), np.asarray(cotangents["dprojected"], np.float64)
    out = READ_OUT.oracle(wide)["out"]
    found = READ_OUT.oracle(wide, {"dout": (d @ matrix).reshape(out.shape)})
    out = found.pop("out").reshape(*out.shape[:2], matrix.shape[1])
    dmatrix = np.einsum("btd,btc->dc", d, out)
    return {**found, "projected": out @ matrix.T, "dmatrix": dmatrix}


def value_and_gradients(
    inputs: Arrays,
    cotangents: Arrays,
    *,
    function: Callable[..., jax.Array] = layers.projected_read_out,
    **options: Any,
) -> dict[str, jax.Array]:
    """The result and the gradients by name."""
    projected, vjp = jax.vjp(lambda x: function(**x, **options), inputs)
    (gradients,) = vjp(cotangents["dprojected"])
    return {"projected": projected} | {f"d{name}": x for name, x in gradients.items()}


def apart(*, matrix: Any, implementation: str | None = None, **inputs: Any) -> jax.Array:
    """`read_out` and the product, one after the other."""
    out = layers.read_out(**inputs, implementation=implementation)
    out = out.reshape(*out.shape[:2], matrix.shape[1])
    narrow = matrix.astype(out.dtype)
    return jnp.einsum("btc,dc->btd", out, narrow, preferred_element_type=out.dtype)


def assert_right(found: Arrays, right: Arrays, dtype: str) -> None:
    """Close to the oracle. What is between the two functions is rounded to the dtype."""
    ceiling = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}[dtype]
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, ceiling)
    for name, x in found.items():
        if name != "dmatrix":
            assert x.dtype == READ_OUT.dtype(name, dtype), name
