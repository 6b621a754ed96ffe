"""Kernels and plain XLA compiled for TPUs, which are not here, by the compiler in libtpu."""

import functools
import os
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from support.cases import Case
from support.harness import operands, value_and_gradients
from support.operators import OPERATORS, Run

KERNELS = 6
VMEM = 4 * 2**20
"""A kernel takes fewer bytes of VMEM, of which the compiler gives it up to 16 MB. Small operands
would be in VMEM themselves, and a kernel would take none."""
SCOPED = r'"used_scoped_memory_configs":\[{"memory_space":"1","offset":"0","size":"(\d+)"'

CASES = (
    *(
        ("pallas", "v5e", op, Case(1, 2048, 16, size, dtype=dtype, decay="log"))
        for op in ("wkv7", "wkv6", "wkv5")
        for size in (64, 128)
        for dtype in ("bfloat16", "float32")
        if op == "wkv7" or (size == 128) == (dtype == "float32")
    ),
    ("pallas", "v6e", "wkv7", Case(1, 2048, 16, 128, dtype="float32", decay="log")),
    *(
        ("xla", "v5e", op, Case(1, 100, 2, 64, dtype="bfloat16", decay="log"))
        for op in ("wkv7", "wkv4")
    ),
)


@functools.cache
def _tpu(kind: str) -> jax.sharding.Sharding:
    # Test processes that run at the same time do not wait for each other: there is no device.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    found = topologies.get_topology_desc(platform="tpu", topology_name=f"{kind}:2x2x1")
    return jax.sharding.SingleDeviceSharding(found.devices[0])


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "kind", "op", "case"), CASES, ids=str)
def test_compiles(implementation: str, kind: str, op: str, case: Case) -> None:
    def described(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=_tpu(kind))

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
    kernels = [x for x in text.splitlines() if 'custom_call_target="tpu_custom_call"' in x]
    assert len(kernels) == (KERNELS if implementation == "pallas" else 0)
    used = [int(size) for kernel in kernels for size in re.findall(SCOPED, kernel)]
    assert len(used) == len(kernels)
    assert all(size < VMEM for size in used), used
    assert any(used) == bool(kernels)
