"""`segment_ids` of a sequence over several devices. Forced CPU devices."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import sharding
from support import hlo, internals, meshes
from support.cases import Case
from support.harness import assert_right, check, expected, operands, results, value_and_gradients
from support.operators import FAST

ROWS = {
    "one over all devices": [1] * 64,
    "several": [1] * 10 + [2] * 30 + [3] * 24,
    "from the first token of a device": [1] * 16 + [2] * 16 + [3] * 32,
    "padding on both sides of a device": [4] * 30 + [0] * 18 + [4] * 16,
    "a device with padding alone": [0] * 16 + [7] * 16 + [0] * 16 + [7] * 16,
    "padding around a boundary": [0] * 20 + [1] * 4 + [0] * 9 + [1] * 31,
    "padding at the end": [2] * 3 + [1] * 17 + [0] * 44,
    "padding alone": [0] * 64,
}
"""For four devices with 16 tokens each, or two with 32."""
IDS = np.array(list(ROWS.values()), np.int32)
CASE = Case(len(ROWS), 64, 2, 16)

QUICK = [
    ("wkv7", "seq=4", AxisType.Auto),
    ("wkv6", "data=2,seq=2", AxisType.Explicit),
    ("wkv5", "outer=2,inner=2", AxisType.Auto),
    ("wkv4", "seq=4", AxisType.Explicit),
]
OTHERS = [
    ("wkv7", "model=2,seq=2", AxisType.Auto),
    ("wkv7", "data=2,model=2", AxisType.Auto),
    ("wkv4", "data=2,seq=2", AxisType.Explicit),
    ("wkv4", "outer=2,inner=2", AxisType.Explicit),
]
"""The two operators that differ most; each mesh is there twice."""


def _check(
    op: str, mesh: str, axis_type: AxisType, cpus: list[Any], *, case: Case = CASE, ids: Any = IDS
) -> None:
    devices = meshes.mesh(mesh, axis_type, cpus)
    function = sharding.shard(FAST[op].public, devices, **meshes.PLACES[mesh])
    check(FAST[op], case, function=function, segment_ids=ids)


@pytest.mark.parametrize(("op", "mesh", "axis_type"), QUICK)
def test_shard(op: str, mesh: str, axis_type: AxisType, cpus: list[Any]) -> None:
    _check(op, mesh, axis_type, cpus)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "mesh", "axis_type"), OTHERS)
def test_shard_on_other_meshes(op: str, mesh: str, axis_type: AxisType, cpus: list[Any]) -> None:
    case = dataclasses.replace(CASE, state=axis_type == AxisType.Auto)
    _check(op, mesh, axis_type, cpus, case=case)


@pytest.mark.parametrize("op", [pytest.param(x, marks=pytest.mark.slow) for x in ("wkv7", "wkv4")])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_of_ones_own(op: str, axis_type: AxisType, cpus: list[Any]) -> None:
    run, mesh = FAST[op], meshes.mesh("seq=4", axis_type, cpus)
    function = sharding.sequence_parallel(run.public, "seq")
    inputs, cotangents = operands(op, CASE, segment_ids=IDS)
    specs = {name: P(None, "seq") if name in run.operator.timed else P() for name in inputs}
    outs = {name: P(None, "seq") if name == "y" else P() for name in run.operator.results}

    def call(inputs: dict, ids: jax.Array) -> dict:
        return results(run, function, **inputs, segment_ids=ids)

    spread = jax.shard_map(call, mesh=mesh, in_specs=(specs, P(None, "seq")), out_specs=outs)

    def both(inputs: dict, ids: jax.Array, d: dict) -> dict:
        found, vjp = jax.vjp(lambda inputs: spread(inputs, ids), inputs)
        (gradients,) = vjp(d)
        return found | {f"d{name}": x for name, x in gradients.items()}

    ids = jax.device_put(IDS, NamedSharding(mesh, P(None, "seq")))
    d = meshes.put(mesh, outs, {name: cotangents[f"d{name}"] for name in outs})
    found = jax.jit(both)(meshes.put(mesh, specs, inputs), ids, d)
    assert_right(found, expected(op, inputs, cotangents, segment_ids=IDS))


@pytest.mark.slow
@pytest.mark.parametrize("op", ["wkv7", "wkv4"])
def test_splits_on_each_device(op: str, cpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device splits its part of the sequence further; segments cross the splits as well."""
    internals.split_on_each_device(monkeypatch)
    ids = np.repeat(IDS, 6, axis=1)
    case = Case(len(ids), ids.shape[1], 1, 16)
    _check(op, "seq=2", AxisType.Auto, cpus, case=case, ids=ids)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["wkv7"])
def test_bytes_exchanged_do_not_depend_on_the_tokens(op: str, cpus: list[Any]) -> None:
    """Each row costs a few integers more than a row without segments."""
    run, batch = FAST[op], 2
    mesh = meshes.mesh("seq=4", AxisType.Auto, cpus)
    function = sharding.shard(run.public, mesh, sequence="seq")
    place = NamedSharding(mesh, P(None, "seq"))

    def bytes_of(tokens: int, packed: bool) -> int:
        ids = jax.device_put(np.ones((batch, tokens), np.int32), place) if packed else None
        arrays = operands(op, Case(batch, tokens, 1, 16))
        lowered = value_and_gradients.lower(run, *arrays, function=function, segment_ids=ids)
        return hlo.exchanged(lowered.compile().as_text())

    found = [bytes_of(tokens, True) for tokens in (64, 1024)]
    assert found[0] == found[1]
    assert 0 <= found[0] - bytes_of(64, False) <= 64 * batch
