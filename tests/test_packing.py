"""JAX's transformations of packed rows, of both kinds."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.cases import Case
from support.harness import assert_right, expected, operands, value_and_gradients
from support.operators import FAST, Run

IDS = np.array([[1] * 20 + [2] * 45 + [0] * 5, [0] * 5 + [3] * 30 + [1] + [3] * 34], np.int32)
CU_SEQLENS = np.array([[0, 0, 1, 7, 7, 70, 70], [0, 9, 9, 9, 50, 66, 70]], np.int32)

each_packing = pytest.mark.parametrize("packing", ["segment_ids", "cu_seqlens"])


def _given(op: str, packing: str) -> tuple[dict, dict, np.ndarray, np.ndarray]:
    """Inputs, cotangents, and two packings of the same shape that suit them."""
    if packing == "segment_ids":
        return *operands(op, Case(2, 70, 1, 16)), IDS, IDS[::-1]
    return *operands(op, Case(1, 70, 2, 16), cu_seqlens=CU_SEQLENS[0]), *CU_SEQLENS


@pytest.mark.parametrize("op", ["wkv7", "wkv4"])
@each_packing
def test_vmap(packing: str, op: str) -> None:
    """The packing is mapped, and then not; all inputs of tokens but one are mapped."""
    run, (inputs, cotangents, one, other) = FAST[op], _given(op, packing)
    several = run.operator.timed[1:]
    mapped = {n: np.stack([x, x[:, ::-1]]) if n in several else x for n, x in inputs.items()}
    axes = {n: 0 if n in several else None for n in inputs}

    def call(inputs: dict, rows: Any) -> dict:
        return value_and_gradients(run, inputs, cotangents, **{packing: rows})

    for rows, axis in ((np.stack([one, other]), 0), (one, None)):
        found = jax.vmap(call, in_axes=(axes, axis))(mapped, rows)
        for i in range(2):
            own = {n: x[i] if n in several else x for n, x in mapped.items()}
            packed: dict[str, Any] = {packing: one if axis is None else rows[i]}
            right = expected(op, own, cotangents, **packed)
            assert_right({name: x[i] for name, x in found.items()}, right)


@each_packing
def test_remat_inside_a_scan(packing: str) -> None:
    run, (inputs, cotangents, rows, _) = FAST["wkv7"], _given("wkv7", packing)

    def loss(v: jax.Array, run: Run, remat: bool) -> jax.Array:
        def layer(v: jax.Array, _: None) -> tuple[jax.Array, None]:
            return run(**{**inputs, "v": v, packing: rows}, precision="highest")[0], None

        y, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, v, None, length=2)
        return jnp.vdot(y, cotangents["dy"])

    gradient = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    found = gradient(inputs["v"], run, True)
    assert_right({"dv": found}, {"dv": gradient(inputs["v"], Run("wkv7", "reference"), False)})
