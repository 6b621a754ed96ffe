"""Results and all gradients of every operator, in every implementation, on every case."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rwkv_jax
from support import cases, tolerance
from support.cases import Case
from support.operators import (
    OPERATORS,
    Run,
    available,
    everything,
    runs,
    sequential,
    value_and_gradients,
)


def _check(name: str, case: Case, implementation: str | None, precision: str | None) -> None:
    operator = OPERATORS[name]
    case = operator.suited(case)
    inputs, cotangents = operator.make(case)
    options = {
        "decay": case.decay,
        "implementation": implementation,
        "precision": precision,
    }
    results = value_and_gradients(name, tuple(options.items()), inputs, cotangents)
    expected = operator.oracle(inputs, case.decay, cotangents)

    runs = implementation or available(name, case)[0]
    kind = {
        "sequential": sequential(name, runs, inputs, precision),
        "highest": precision == "highest",
    }
    tolerance.assert_close(
        jax.device_get(results),
        expected,
        {n: tolerance.ceiling(n, case.dtype, **kind) for n in results},
    )
    states = {*operator.states, *operator.results[1:]}
    dtypes = {n: str(x.dtype) for n, x in results.items()}
    assert dtypes == {
        n: "float32" if states & {n, n.removeprefix("d")} else case.dtype for n in results
    }


@pytest.mark.parametrize(
    ("name", "case", "implementation"), everything(), ids=lambda value: str(value)
)
def test_against_the_oracle(name: str, case: Case, implementation: str) -> None:
    _check(name, case, implementation, "highest" if case.dtype == "float32" else None)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("precision", [None, "high"])
def test_precisions(name: str, precision: str | None) -> None:
    case = Case(2, 16, 2, 32)
    for implementation in available(name, case):
        _check(name, case, implementation, precision)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_naming_an_implementation(name: str, dtype: str) -> None:
    _check(name, Case(2, 16, 2, 32, dtype=dtype), None, None)


@pytest.mark.parametrize("run", runs(Case(2, 16, 2, 32)))
def test_each_cotangent_alone(run: Run) -> None:
    operator = run.operator
    case = operator.suited(Case(2, 16, 2, 32))
    inputs, both = operator.make(case)
    options = {
        "decay": case.decay,
        "implementation": run.implementation,
        "precision": "highest",
    }
    for alone in both:
        cotangents = {n: x if n == alone else np.zeros_like(x) for n, x in both.items()}
        results = value_and_gradients(run.op, tuple(options.items()), inputs, cotangents)
        expected = operator.oracle(inputs, case.decay, cotangents)
        tolerance.assert_close(jax.device_get(results), expected, tolerance.EXACT_FLOAT32)


@pytest.mark.parametrize("run", runs(Case(2, 16, 2, 32)))
def test_no_tokens_return_the_state(run: Run) -> None:
    inputs, cotangents = run.operator.make(Case(2, 0, 2, 32))
    options = (("implementation", run.implementation),)
    results = value_and_gradients(run.op, options, inputs, cotangents)
    assert results["y"].shape == inputs["v"].shape
    for start, end in zip(run.operator.states, run.operator.results[1:], strict=True):
        np.testing.assert_array_equal(results[end], inputs[start])
        np.testing.assert_array_equal(results[f"d{start}"], cotangents[f"d{end}"])


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
    for x, right in zip(step(**token | scalars), step(**token | repeated), strict=True):
        np.testing.assert_array_equal(x, right)
