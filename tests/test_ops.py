"""Results and all gradients of every operator, in every implementation, on every case."""

import jax
import numpy as np
import pytest

import tolerance
from cases import Case
from operators import OPERATORS, available, everything, sequential, value_and_gradients


def _check(name: str, case: Case, implementation: str | None, precision: str | None) -> None:
    operator = OPERATORS[name]
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
    dtypes = {n: str(x.dtype) for n, x in results.items()}
    assert dtypes == {n: "float32" if "state" in n else case.dtype for n in results}


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


@pytest.mark.parametrize("implementation", available("wkv7", Case(1, 16, 1, 16)))
def test_each_cotangent_alone(implementation: str) -> None:
    case = Case(2, 16, 2, 32)
    operator = OPERATORS["wkv7"]
    inputs, both = operator.make(case)
    options = (("decay", case.decay), ("implementation", implementation), ("precision", "highest"))
    for alone in both:
        cotangents = {n: x if n == alone else np.zeros_like(x) for n, x in both.items()}
        results = value_and_gradients("wkv7", options, inputs, cotangents)
        expected = operator.oracle(inputs, case.decay, cotangents)
        tolerance.assert_close(jax.device_get(results), expected, tolerance.EXACT_FLOAT32)


@pytest.mark.parametrize("implementation", available("wkv7", Case(1, 16, 1, 16)))
def test_no_tokens_return_the_state(implementation: str) -> None:
    operator = OPERATORS["wkv7"]
    inputs, cotangents = operator.make(Case(2, 0, 2, 32))
    options = (("implementation", implementation),)
    results = value_and_gradients("wkv7", options, inputs, cotangents)
    assert results["y"].shape == (2, 0, 2, 32)
    np.testing.assert_array_equal(results["final_state"], inputs["initial_state"])
    np.testing.assert_array_equal(results["dinitial_state"], cotangents["dfinal_state"])
