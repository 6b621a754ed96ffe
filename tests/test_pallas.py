"""The Pallas kernels without the devices that they are for: run by an interpreter, and lowered."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import cases
import rwkv_jax
import tolerance
from cases import Case
from operators import OPERATORS, value_and_gradients
from rwkv_jax import _pallas

OPS = ("wkv7", "wkv6", "wkv5")

pytestmark = pytest.mark.filterwarnings("ignore:.*Triton.*:DeprecationWarning")


@pytest.fixture(scope="module", params=_pallas.PLATFORMS)
def interpreted(request: pytest.FixtureRequest):
    """The platform whose kernels run on the CPU."""
    with pytest.MonkeyPatch.context() as patch, jax.default_device(jax.devices("cpu")[0]):
        patch.setattr(_pallas, "INTERPRET", request.param)
        jax.clear_caches()
        yield request.param
    jax.clear_caches()


def _check(op: str, case: Case, precision: str | None = None) -> None:
    operator = OPERATORS[op]
    case = operator.suited(case)
    inputs, cotangents = operator.make(case)
    highest = precision is None and case.dtype == "float32"
    options = {
        "decay": case.decay,
        "implementation": "pallas",
        "precision": "highest" if highest else precision or "default",
    }
    results = value_and_gradients(op, tuple(options.items()), inputs, cotangents)
    limits = {
        n: tolerance.ceiling(n, case.dtype, sequential=False, highest=highest) for n in results
    }
    expected = operator.oracle(inputs, case.decay, cotangents)
    tolerance.assert_close(jax.device_get(results), expected, limits)
    for name, x in results.items():
        assert x.dtype == ("float32" if "state" in name else case.dtype), name


FORMS = (
    ("wkv7", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv6", Case(1, 65, 2, 16, dtype="bfloat16")),
    ("wkv5", Case(1, 65, 1, 32, V=16)),
)
"""More than a frame, and one chunk more than its last token fills."""

ON_CUDA = (
    ("wkv7", Case(2, 1, 1, 64, state=False)),
    ("wkv7", Case(1, 17, 1, 16, V=128, decay="exp", dtype="float16")),
    ("wkv6", Case(1, 16, 1, 64)),
    *(
        (op, Case(1, 65, 1, 32, dtype=dtype, decay=decay, regime=regime))
        for op, dtype, decay, regimes in (
            ("wkv7", "float32", "exp", ("mixed", "extreme", "near 0", "near 1")),
            ("wkv7", "bfloat16", "log", ("mixed", "near 1")),
            ("wkv7", "float32", "sigmoid", ("mixed",)),
            ("wkv6", "float32", "log", ("mixed", "extreme", "near 0", "near 1")),
        )
        for regime in regimes
    ),
)


@pytest.mark.parametrize(("op", "case"), FORMS, ids=str)
def test_both_forms_of_kernels(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)


@pytest.mark.parametrize("interpreted", ["cuda"], indirect=True)
@pytest.mark.parametrize(("op", "case"), ON_CUDA, ids=str)
def test_against_the_oracle(interpreted: str, op: str, case: Case) -> None:
    _check(op, case)
