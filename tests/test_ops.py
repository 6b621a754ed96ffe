"""Results and all gradients of every operator, in every implementation, on every case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from support import cases
from support.cases import Case
from support.harness import check
from support.operators import OPERATORS, Run, available, everything


def _slow_here(name: str, case: Case, implementation: str) -> list[pytest.MarkDecorator]:
    """Plain XLA compiles for seconds, and that of WKV5 and WKV6 has the parts of that of WKV7."""
    slow = implementation == "xla" and not name.startswith(("wkv7", "wkv4"))
    return [pytest.mark.slow] * slow


pytestmark = pytest.mark.quick("name,implementation", "name,case.dtype")


@pytest.mark.parametrize(
    ("name", "case", "implementation"),
    [pytest.param(*x, marks=_slow_here(*x), id="-".join(map(str, x))) for x in everything()],
)
def test_against_the_oracle(name: str, case: Case, implementation: str) -> None:
    precision = "highest" if case.dtype == "float32" else None
    check(Run(name, implementation), case, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("precision", [None, "high"])
def test_precisions(name: str, precision: str | None) -> None:
    """Native kernels and the reference know no precision between the default and the highest."""
    case = Case(2, 16, 2, 32)
    ignore = ("ffi", "reference") if precision == "high" else ()
    for implementation in set(available(name, case)) - set(ignore):
        check(Run(name, implementation), case, precision=precision)


@pytest.mark.slow
def test_one_decay_and_bonus_for_each_head() -> None:
    inputs, _ = cases.wkv5(Case(2, 17, 3, 16))
    scalars = {name: inputs[name][:, :1] for name in "wu"}
    repeated = {name: np.repeat(x, 16, axis=1) for name, x in scalars.items()}

    sequence: Any = rwkv_jax.wkv5

    def loss(parameters: dict) -> jax.Array:
        y, state = sequence(**inputs | parameters, decay="exp", precision="highest")
        return jnp.sum(jnp.sin(y)) + jnp.sum(state)

    value, gradients = jax.value_and_grad(loss)(scalars)
    expected, by_channel = jax.value_and_grad(loss)(repeated)
    np.testing.assert_array_equal(value, expected)
    for name in "wu":
        total = np.sum(by_channel[name], axis=1, keepdims=True)
        np.testing.assert_allclose(gradients[name], total, rtol=1e-4)
    token = {n: x[:, 0] if x.ndim == 4 else x for n, x in inputs.items() if n != "initial_state"}
    token["state"] = inputs["initial_state"]
    step: Any = rwkv_jax.wkv5_step
    ends = (step(**token | x, decay="exp") for x in (scalars, repeated))
    for x, right in zip(*ends, strict=True):
        np.testing.assert_array_equal(x, right)
