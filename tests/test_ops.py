"""Results and all gradients of every operator, in every implementation, on every case."""

import jax
import numpy as np
import pytest

from support.cases import Case
from support.harness import assert_right, check, operands, value_and_gradients
from support.operators import OPERATORS, Run, available, everything

pytestmark = pytest.mark.quick("name,implementation", "name,case.dtype")


@pytest.mark.parametrize(
    ("name", "case", "implementation"),
    [
        # Plain XLA compiles for seconds, and that of WKV5 and WKV6 has the parts of that of WKV7.
        pytest.param(
            *(name, case, implementation),
            marks=[pytest.mark.slow] * (implementation == "xla" and name[:4] in ("wkv5", "wkv6")),
            id=f"{name}-{case}-{implementation}",
        )
        for name, case, implementation in everything()
    ],
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
@pytest.mark.parametrize("op", ["wkv5", "wkv5_step"])
def test_one_decay_and_bonus_for_each_head(op: str) -> None:
    inputs, cotangents = operands(op, Case(2, 17, 3, 16))
    scalars = {name: inputs[name][:, :1] for name in "wu"}
    repeated = {name: np.repeat(x, 16, axis=1) for name, x in scalars.items()}
    found, right = (
        jax.device_get(value_and_gradients(Run(op, None), inputs | parameters, cotangents))
        for parameters in (scalars, repeated)
    )
    right |= {f"d{name}": right[f"d{name}"].sum(axis=1, keepdims=True) for name in "wu"}
    assert_right(found, right)
