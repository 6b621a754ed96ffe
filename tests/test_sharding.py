"""`rwkv_jax.sharding`: batch, heads and sequence over the axes of a mesh. Forced CPU devices."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rwkv_jax
from rwkv_jax import sharding
from support import hlo, internals, meshes
from support.cases import Case
from support.harness import (
    assert_right,
    check,
    expected,
    operands,
    results,
    value_and_gradients,
)
from support.operators import SEQUENCES, STEPS, Run, available, runs

pytestmark = pytest.mark.quick("run", "op")

CASE = Case(4, 32, 4, 16)
RUNS = [x for x in runs(CASE, platform="cpu") if x.values[0].implementation != "xla"]
NATIVE = [x for x in RUNS if x.values[0].implementation == "ffi"]
XLA = Run("wkv7", "xla")
"""It differs only in what each device runs, and compiles slowly."""

each_run = pytest.mark.parametrize("run", RUNS)
each_native_run = pytest.mark.parametrize("run", [x for x in NATIVE if x.id != "wkv6-ffi"])
"""WKV5 has the summaries of WKV6, and one more input that all tokens share."""

MIXES = [
    ("data=2,seq=2", AxisType.Auto, True),
    ("model=2,seq=2", AxisType.Explicit, True),
    ("data=2,model=2", AxisType.Explicit, False),
    ("seq=4", AxisType.Auto, False),
    ("outer=2,inner=2", AxisType.Auto, True),
]
"""Each mesh once, and all kinds of axes and checks."""

PLACED = [
    pytest.param(*run.values, *mix, id=f"{run.id}-{mix[0]}")
    for run in RUNS
    for mix in (MIXES if run.id == "wkv7-ffi" else MIXES[::2])
]
"""All of them for one run; a mesh is the same to all operators but for their summaries."""


def _sharded(run: Run, axes: str, axis_type: AxisType, cpus: list[Any], **options: Any) -> Any:
    """The operator with `sharding.shard` over a mesh."""
    mesh = meshes.mesh(axes, axis_type, cpus)
    return sharding.shard(run.public, mesh, **{**meshes.PLACES[axes], **options})


@pytest.mark.parametrize(("run", "mesh", "axis_type", "check_vma"), PLACED)
def test_shard(run: Run, mesh: str, axis_type: AxisType, check_vma: bool, cpus: list[Any]) -> None:
    """Values and all gradients, also of parameters and of a state that all devices have."""
    function = _sharded(run, mesh, axis_type, cpus, check_vma=check_vma)
    inputs, cotangents = operands(run.op, CASE)
    compiled = value_and_gradients.lower(run, inputs, cotangents, function=function).compile()
    assert_right(compiled(inputs, cotangents), expected(run.op, inputs, cotangents))
    if run.implementation == "ffi":
        native = internals.targets(run.op, "fwd", "bwd")
        assert hlo.targets(compiled.as_text()) == native
    if "sequence" not in meshes.PLACES[mesh]:
        summed = bool(run.operator.shared)
        assert hlo.collectives(compiled.as_text()) == ({"all-reduce"} if summed else set())


@pytest.mark.slow
@each_native_run
def test_splits_on_each_device(run: Run, cpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device splits its part of the sequence, as a large GPU does that has few heads."""
    internals.split_on_each_device(monkeypatch)
    function = _sharded(run, "seq=2", AxisType.Auto, cpus)
    check(run, Case(1, 3 * internals.CHUNK * 2, 2, 16), function=function)


@pytest.mark.parametrize("op", ["wkv7", "wkv5", "wkv4"])
def test_bytes_exchanged_do_not_depend_on_the_tokens(op: str, cpus: list[Any]) -> None:
    """Forward: the summaries of all devices. Backward: as many states, once, and sums."""
    run, heads, size = Run(op, available(op, CASE, "cpu")[0]), 2, 16
    function = _sharded(run, "seq=4", AxisType.Auto, cpus)
    sizes = {"B": 1, "H": heads, "C": heads * size} | dict.fromkeys("KLV", size)

    def bytes_of(axes: Mapping[str, str]) -> int:
        return sum(4 * math.prod(sizes[x] for x in letters) for letters in axes.values())

    def forward(inputs: dict, cotangents: dict) -> jax.Array:
        return results(run, function, **inputs)["y"]

    def backward(inputs: dict, cotangents: dict) -> dict:
        return value_and_gradients(run, inputs, cotangents, function=function)

    def exchanged(call: Any, tokens: int) -> int:
        arrays = operands(op, Case(1, tokens, heads, size))
        return hlo.exchanged(jax.jit(call).lower(*arrays).compile().as_text())

    found = [exchanged(call, 64) for call in (forward, backward)]
    assert exchanged(backward, 4096) == found[1]
    summaries = 4 * bytes_of(internals.summary(op).axes)
    states = bytes_of(internals.axes_of_state(op))
    arguments = internals.axes_of_arguments(op)
    shared = bytes_of({name: arguments[name] for name in run.operator.shared})
    assert found == [summaries, summaries + 4 * states + 2 * states + shared]


@each_native_run
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_of_ones_own(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    """A loss over all tokens is differentiated inside; there is no state, and another axis of the
    mesh distributes the batch."""
    mesh = meshes.mesh("data=2,seq=2", axis_type, cpus)
    function = sharding.sequence_parallel(run.public, "seq")
    inputs, cotangents = operands(run.op, Case(2, 32, 2, 16, state=False))
    arrays = {**inputs, "dy": cotangents["dy"]}

    def loss(dy: jax.Array, function: Any = None, **inputs: jax.Array) -> jax.Array:
        return jnp.vdot(results(run, function, **inputs)["y"], dy)

    def gradient(dy: jax.Array, **inputs: jax.Array) -> dict:
        def whole(inputs: dict) -> jax.Array:
            return jax.lax.psum(loss(dy, function, **inputs), ("data", "seq"))

        return jax.grad(whole)(inputs)

    specs = {n: P() if n in run.operator.shared else P("data", "seq") for n in arrays}
    call = jax.shard_map(
        lambda xs: gradient(**xs),
        mesh=mesh,
        in_specs=(specs,),
        out_specs={name: specs[name] for name in inputs},
    )
    found = jax.jit(call)(meshes.put(mesh, specs, arrays))
    right = jax.grad(lambda xs: loss(cotangents["dy"], **xs))(inputs)
    assert_right(found, right)


@each_native_run
def test_the_mesh_that_is_set(run: Run, cpus: list[Any]) -> None:
    """`shard` takes that mesh, and results stay where the operands are."""
    inputs, cotangents = operands(run.op, CASE)
    with jax.set_mesh(meshes.mesh("data=2,seq=2", AxisType.Explicit, cpus)):
        function = sharding.shard(run.public, batch="data", sequence="seq")
        found = jax.jit(lambda xs: results(run, function, **xs))(inputs)
    assert found["y"].sharding.spec[:2] == ("data", "seq")
    assert_right(found, expected(run.op, inputs, cotangents))


@pytest.mark.parametrize("run", [*NATIVE, XLA])
@pytest.mark.parametrize("case", [Case(2, 0, 2, 16), Case(0, 8, 2, 16)], ids=str)
def test_nothing(run: Run, case: Case, cpus: list[Any]) -> None:
    check(run, case, function=_sharded(run, "seq=2", AxisType.Auto, cpus))


@pytest.mark.slow
@each_native_run
def test_sixteen_bits(run: Run, cpus: list[Any]) -> None:
    function = _sharded(run, "seq=4", AxisType.Auto, cpus)
    check(run, Case(1, 64, 2, 16, dtype="bfloat16"), function=function)


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["near 0", "mixed", "extreme"])
@pytest.mark.parametrize("op", SEQUENCES)
def test_any_decay(op: str, regime: str, cpus: list[Any]) -> None:
    run = Run(op, "ffi")
    case = Case(1, 64, 2, 16, decay=run.operator.decays[-1], regime=regime)
    check(run, case, function=_sharded(run, "seq=4", AxisType.Auto, cpus))


@each_native_run
def test_vmap_and_remat(run: Run, cpus: list[Any]) -> None:
    function = _sharded(run, "seq=2", AxisType.Auto, cpus)
    several = [operands(run.op, Case(1, 16, 2, 16, seed=seed)) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *several)

    def remat(decay: Any, precision: Any, implementation: Any, **arrays: Any) -> Any:
        options = {"decay": decay, "precision": precision, "implementation": implementation}
        return jax.checkpoint(lambda arrays: function(**arrays, **options))(arrays)

    call = functools.partial(value_and_gradients, run, function=remat)
    found = jax.vmap(call)(*stacked)
    for i, one in enumerate(several):
        assert_right({n: x[i] for n, x in found.items()}, expected(run.op, *one))


@pytest.mark.parametrize("op", STEPS)
def test_steps(op: str, cpus: list[Any]) -> None:
    run, (inputs, cotangents) = Run(op, None), operands(op, Case(4, 1, 4, 16))
    mesh = meshes.mesh("data=2,model=2", AxisType.Explicit, cpus)
    function = sharding.shard(run.public, mesh, batch="data", heads="model")
    active = np.ones(4, bool)
    call = jax.jit(lambda xs: results(run, function, active=active, **xs))
    compiled = call.lower(inputs).compile()
    assert_right(compiled(inputs), expected(op, inputs, cotangents))
    assert hlo.collectives(compiled.as_text()) == set()


def test_refusals(cpus: list[Any]) -> None:
    devices = meshes.mesh("data=2,seq=2", AxisType.Auto, cpus)
    shard, wkv7 = sharding.shard, rwkv_jax.wkv7
    with pytest.raises(ValueError, match="wkv7: batch is 'rows'; accepted are 'data', 'seq'"):
        shard(wkv7, devices, batch="rows")
    with pytest.raises(ValueError, match="wkv7: heads is 'data', and batch is 'data'"):
        shard(wkv7, devices, batch="data", heads="data")
    with pytest.raises(ValueError, match="wkv4_step: sequence is 'seq'; accepted is None"):
        shard(rwkv_jax.wkv4_step, devices, sequence="seq")
    with pytest.raises(ValueError, match="mesh is None and no mesh is set"):
        shard(wkv7, batch="data")
    with pytest.raises(TypeError, match=r"operator is .*; accepted are wkv4, "):
        shard(jnp.sum, devices)
    with pytest.raises(TypeError, match="wkv7_step is a step; accepted are the operators"):
        sharding.sequence_parallel(rwkv_jax.wkv7_step, "seq")
    function: Any = shard(wkv7, devices, batch="data", sequence="seq")
    x = jnp.zeros((2, 9, 2, 16))
    with pytest.raises(
        ValueError, match=r"wkv7: a has shape .* T = 9; accepted is a multiple of 2"
    ):
        function(x, x, x, x, x, x, decay="sigmoid")
    with pytest.raises(TypeError, match=r"required .*argument: 'decay'"):
        function(x, x, x, x, x, x)
    with pytest.raises(ValueError, match="wkv7: w has shape"):
        function(x, x[:, :1], x, x, x, x, decay="sigmoid")
