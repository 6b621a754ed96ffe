"""`segment_ids` of sequences that devices have parts of. Forced CPU devices."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import _over_devices, sharding
from support import hlo, tolerance
from support.cases import Case
from support.operators import Run, flat
from test_packing import expected
from test_random_packings import RUNS

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

PLACES: dict[str, Any] = {
    "seq=4": {"sequence": "seq"},
    "data=2,seq=2": {"batch": "data", "sequence": "seq"},
    "model=2,seq=2": {"heads": "model", "sequence": "seq"},
    "outer=2,inner=2": {"sequence": ("outer", "inner")},
    "data=2,model=2": {"batch": "data", "heads": "model"},
}
QUICK = [
    ("wkv7", "seq=4", AxisType.Auto),
    ("wkv6", "data=2,seq=2", AxisType.Explicit),
    ("wkv5", "outer=2,inner=2", AxisType.Auto),
    ("wkv4", "seq=4", AxisType.Explicit),
]
ALL = [
    (op, mesh, kind)
    for op, kind in (("wkv7", AxisType.Auto), ("wkv4", AxisType.Explicit))
    for mesh in PLACES
]
"""Of the operators that differ most."""


def _mesh(text: str, axis_type: AxisType, cpus: list[Any]) -> Mesh:
    names, sizes = zip(*(axis.split("=") for axis in text.split(",")), strict=True)
    types = (axis_type,) * len(names)
    return jax.make_mesh(tuple(map(int, sizes)), names, axis_types=types, devices=cpus)


def _options(run: Run) -> dict[str, Any]:
    return {
        "decay": run.operator.decays[-1],
        "precision": "highest",
        "implementation": run.implementation,
    }


def _made(run: Run, case: Case = CASE) -> tuple[dict, dict]:
    inputs, cotangents = run.operator.make(run.operator.suited(case))
    for name in run.operator.inputs:
        if name not in run.operator.shared:
            inputs[name][IDS == 0] = np.nan
    return inputs, cotangents


def _both(run: Run, function: Callable[..., Any], inputs: dict, d: dict, ids: Any) -> dict:
    """Results and gradients by name."""
    call, names = flat(run.op, function), run.operator.results
    results, vjp = jax.vjp(lambda x: tuple(call(**x, **_options(run), segment_ids=ids)), inputs)
    kinds = [jax.typeof(x).sharding for x in results]
    (gradients,) = vjp(
        tuple(
            jax.sharding.reshard(d[f"d{n}"], kind)
            if AxisType.Explicit in kind.mesh.axis_types
            else jnp.asarray(d[f"d{n}"])
            for n, kind in zip(names, kinds, strict=True)
        )
    )
    return dict(zip(names, results, strict=True)) | {f"d{n}": x for n, x in gradients.items()}


def _assert_right(run: Run, found: dict, inputs: dict, cotangents: dict) -> None:
    wanted = expected(run.op, inputs, IDS, run.operator.decays[-1], cotangents)
    arrays = {name: np.asarray(x) for name, x in found.items()}
    tolerance.assert_close(arrays, {n: wanted[n] for n in arrays}, tolerance.EXACT_FLOAT32)


def _check(op: str, mesh: str, axis_type: AxisType, cpus: list[Any], state: bool) -> None:
    run, devices = RUNS[op], _mesh(mesh, axis_type, cpus)
    function = sharding.shard(getattr(rwkv_jax, op), devices, **PLACES[mesh])
    inputs, cotangents = _made(run, dataclasses.replace(CASE, state=state))
    found = jax.jit(lambda *xs: _both(run, function, *xs))(inputs, cotangents, IDS)
    _assert_right(run, found, inputs, cotangents)


@pytest.mark.parametrize(("op", "mesh", "axis_type"), QUICK)
def test_shard(op: str, mesh: str, axis_type: AxisType, cpus: list[Any]) -> None:
    _check(op, mesh, axis_type, cpus, state=True)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "mesh", "axis_type"), [x for x in ALL if x not in QUICK])
def test_shard_on_other_meshes(op: str, mesh: str, axis_type: AxisType, cpus: list[Any]) -> None:
    _check(op, mesh, axis_type, cpus, state=axis_type == AxisType.Auto)


@pytest.mark.parametrize("op", [pytest.param(x, marks=pytest.mark.slow) for x in ("wkv7", "wkv4")])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_of_ones_own(op: str, axis_type: AxisType, cpus: list[Any]) -> None:
    run, devices = RUNS[op], _mesh("seq=4", axis_type, cpus)
    function = sharding.sequence_parallel(getattr(rwkv_jax, op), "seq")
    inputs, cotangents = _made(run)
    timed = [n for n in run.operator.inputs if n not in run.operator.shared]
    specs = {name: P(None, "seq") if name in timed else P() for name in inputs}
    outs = {n: P(None, "seq") if n == "y" else P() for n in run.operator.results}

    def call(inputs: dict, ids: jax.Array) -> dict:
        results = flat(op, function)(**inputs, **_options(run), segment_ids=ids)
        return dict(zip(run.operator.results, results, strict=True))

    spread = jax.shard_map(call, mesh=devices, in_specs=(specs, P(None, "seq")), out_specs=outs)

    def both(inputs: dict, ids: jax.Array, d: dict) -> dict:
        results, vjp = jax.vjp(lambda inputs: spread(inputs, ids), inputs)
        (gradients,) = vjp(d)
        return results | {f"d{n}": x for n, x in gradients.items()}

    def placed(tree: dict, specs: dict) -> dict:
        return {n: jax.device_put(x, NamedSharding(devices, specs[n])) for n, x in tree.items()}

    ids = jax.device_put(IDS, NamedSharding(devices, P(None, "seq")))
    d = placed({n: cotangents[f"d{n}"] for n in outs}, outs)
    _assert_right(run, jax.jit(both)(placed(inputs, specs), ids, d), inputs, cotangents)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["wkv7", "wkv4"])
def test_parts_on_each_device(op: str, cpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut further on each device, into parts that segments cross as well."""
    monkeypatch.setattr(_over_devices, "PART", 64)
    monkeypatch.setattr(_over_devices, "ENOUGH", 1 << 30)
    run, devices = RUNS[op], _mesh("seq=2", AxisType.Auto, cpus[:2])
    function = sharding.shard(getattr(rwkv_jax, op), devices, sequence="seq")
    ids = np.repeat(IDS, 6, axis=1)
    inputs, cotangents = run.operator.make(run.operator.suited(Case(len(ids), 384, 1, 16)))
    found = jax.jit(lambda *xs: _both(run, function, *xs))(inputs, cotangents, ids)
    wanted = expected(op, inputs, ids, run.operator.decays[-1], cotangents)
    arrays = {name: np.asarray(x) for name, x in found.items()}
    tolerance.assert_close(arrays, {n: wanted[n] for n in arrays}, tolerance.EXACT_FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["wkv7"])
def test_bytes_exchanged_do_not_depend_on_the_tokens(op: str, cpus: list[Any]) -> None:
    """And are a few integers a row more than those of rows of one sequence."""
    run, batch = RUNS[op], 2
    devices = _mesh("seq=4", AxisType.Auto, cpus)
    function = sharding.shard(getattr(rwkv_jax, op), devices, sequence="seq")
    place = NamedSharding(devices, P(None, "seq"))

    def bytes_of(tokens: int, packed: bool) -> int:
        operands = run.operator.make(run.operator.suited(Case(batch, tokens, 1, 16)))
        ids = jnp.ones((batch, tokens), jnp.int32) if packed else None
        call = jax.jit(lambda *xs: _both(run, function, *xs), in_shardings=(None, None, place))
        return hlo.exchanged(call.lower(*operands, ids).compile().as_text())

    found = [bytes_of(tokens, True) for tokens in (64, 1024)]
    assert found[0] == found[1]
    assert 0 <= found[0] - bytes_of(64, False) <= 64 * batch
