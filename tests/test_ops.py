"""Results and all gradients of every operator, in every implementation, on every case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from support import cases
from support.cases import Case
from support.harness import assert_right, check, expected, operands, value_and_gradients
from support.operators import OPERATORS, Run, available, everything, runs

pytestmark = pytest.mark.quick("name,implementation", "name,case.dtype")


@pytest.mark.parametrize(
    ("name", "case", "implementation"), everything(), ids=lambda value: str(value)
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


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_naming_an_implementation(name: str, dtype: str) -> None:
    check(Run(name, None), Case(2, 16, 2, 32, dtype=dtype), precision=None)


@pytest.mark.parametrize("run", runs(Case(2, 16, 2, 32)))
def test_each_cotangent_alone(run: Run) -> None:
    inputs, both = operands(run.op, Case(2, 16, 2, 32))
    for alone in both:
        cotangents = {n: x if n == alone else np.zeros_like(x) for n, x in both.items()}
        found = value_and_gradients(run, inputs, cotangents)
        assert_right(found, expected(run.op, inputs, cotangents))


@pytest.mark.parametrize("run", runs(Case(2, 16, 2, 32)))
def test_no_tokens_return_the_state(run: Run) -> None:
    inputs, cotangents = operands(run.op, Case(2, 0, 2, 32))
    found = value_and_gradients(run, inputs, cotangents, precision=None)
    assert found["y"].shape == inputs["v"].shape
    for start, end in zip(run.operator.states, run.operator.results[1:], strict=True):
        np.testing.assert_array_equal(found[end], inputs[start])
        np.testing.assert_array_equal(found[f"d{start}"], cotangents[f"d{end}"])


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
