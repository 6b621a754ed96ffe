"""Kernels and plain XLA compiled for TPUs, which are not here, by the compiler in libtpu."""

import functools
import os
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from support.cases import Case
from support.harness import operands, value_and_gradients
from support.operators import OPERATORS, Run

KERNELS = 6

CASES = (
    *(
        ("pallas", op, Case(1, 100, 2, size, dtype=dtype, decay="log"))
        for op in ("wkv7", "wkv6", "wkv5")
        for size in (64, 128)
        for dtype in ("bfloat16", "float32")
    ),
    ("xla", "wkv4", Case(1, 100, 2, 64, dtype="bfloat16", decay="log")),
)


@functools.cache
def _tpu() -> jax.sharding.Sharding:
    # Test processes that run at the same time do not wait for each other: there is no device.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2x1")
    return jax.sharding.SingleDeviceSharding(found.devices[0])


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "op", "case"), CASES, ids=str)
def test_compiles(implementation: str, op: str, case: Case) -> None:
    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=_tpu())

    inputs, cotangents = jax.tree.map(described, operands(op, case))
    precision = "highest" if case.dtype == "float32" else "default"
    traced = value_and_gradients.trace(
        Run(op, implementation),
        inputs,
        cotangents,
        decay=OPERATORS[op].suited(case).decay,
        precision=precision,
    )
    text = traced.lower(lowering_platforms=("tpu",)).compile().as_text()
    assert text is not None
    kernels = text.count('custom_call_target="tpu_custom_call"')
    assert kernels == (KERNELS if implementation == "pallas" else 0)
