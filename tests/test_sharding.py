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
from support.harness import assert_right, check, expected, operands, results, value_and_gradients
from support.operators import FAST, SEQUENCES, Run, available, runs

pytestmark = pytest.mark.quick("run", "op")

CASE = Case(4, 32, 4, 16)
# Plain XLA differs only in what each device runs, and compiles slowly.
RUNS = [x for x in runs(CASE, platform="cpu") if x.values[0].implementation != "xla"]
NATIVE = [x for x in RUNS if x.values[0].implementation == "ffi"]
each_native_run = pytest.mark.parametrize("run", [x for x in NATIVE if x.id != "wkv6-ffi"])
"""WKV5 has the transitions of WKV6, and one more input that all tokens share."""

MIXES = [
    ("data=2,seq=2", AxisType.Auto, True),
    ("model=2,seq=2", AxisType.Explicit, True),
    ("data=2,model=2", AxisType.Explicit, False),
    ("seq=4", AxisType.Auto, False),
    ("outer=2,inner=2", AxisType.Auto, True),
]
"""Each mesh once, and all kinds of axes and checks."""


def _sharded(run: Run, axes: str, axis_type: AxisType, cpus: list[Any], **options: Any) -> Any:
    """The operator with `sharding.shard` over a mesh."""
    mesh = meshes.mesh(axes, axis_type, cpus)
    return sharding.shard(run.public, mesh, **{**meshes.PLACES[axes], **options})


@pytest.mark.parametrize(
    ("run", "mesh", "axis_type", "check_vma"),
    [
        pytest.param(*run.values, *mix, id=f"{run.id}-{mix[0]}")
        for run in RUNS
        # A mesh is the same to all operators but for their transitions.
        for mix in (MIXES if run.id == "wkv7-ffi" else MIXES[::2])
    ],
)
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


@pytest.mark.parametrize("op", ["wkv7", pytest.param("wkv5", marks=pytest.mark.slow), "wkv4"])
def test_bytes_exchanged_do_not_depend_on_the_tokens(op: str, cpus: list[Any]) -> None:
    """Forward: the transitions of all devices. Backward: as many states, once, and sums."""
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
    transitions = 4 * bytes_of(internals.transition(op).axes)
    states = bytes_of(internals.axes_of_state(op))
    arguments = internals.axes_of_arguments(op)
    shared = bytes_of({name: arguments[name] for name in run.operator.shared})
    assert found == [transitions, transitions + 4 * states + 2 * states + shared]


@each_native_run
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_of_ones_own(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    """A loss over all tokens is differentiated inside; there is no state, and another axis of the
    mesh distributes the batch."""
    mesh = meshes.mesh("data=2,seq=2", axis_type, cpus)
    function = sharding.sequence_parallel(run.public, "seq")
    inputs, cotangents = operands(run.op, Case(2, 32, 2, 16, state=False))
    arrays = inputs | {"dy": cotangents["dy"]}

    def loss(inputs: dict, dy: jax.Array, function: Any = None) -> jax.Array:
        return jnp.vdot(results(run, function, **inputs)["y"], dy)

    def gradients(dy: jax.Array, **inputs: jax.Array) -> dict:
        return jax.grad(lambda xs: jax.lax.psum(loss(xs, dy, function), ("data", "seq")))(inputs)

    specs = {n: P() if n in run.operator.shared else P("data", "seq") for n in arrays}
    call = jax.shard_map(
        lambda arrays: gradients(**arrays),
        mesh=mesh,
        in_specs=(specs,),
        out_specs={name: specs[name] for name in inputs},
    )
    found = jax.jit(call)(meshes.put(mesh, specs, arrays))
    assert_right(found, jax.grad(loss)(inputs, cotangents["dy"]))


@each_native_run
def test_the_mesh_that_is_set(run: Run, cpus: list[Any]) -> None:
    """`shard` takes that mesh, and results stay where the operands are."""
    inputs, cotangents = operands(run.op, CASE)
    with jax.set_mesh(meshes.mesh("data=2,seq=2", AxisType.Explicit, cpus)):
        function = sharding.shard(run.public, batch="data", sequence="seq")
        found = jax.jit(lambda xs: results(run, function, **xs))(inputs)
    assert found["y"].sharding.spec[:2] == ("data", "seq")
    assert_right(found, expected(run.op, inputs, cotangents))


@pytest.mark.parametrize("run", [*NATIVE, Run("wkv7", "xla")])
@pytest.mark.parametrize("case", [Case(2, 0, 2, 16), Case(0, 8, 2, 16)], ids=str)
def test_nothing(run: Run, case: Case, cpus: list[Any]) -> None:
    check(run, case, function=_sharded(run, "seq=2", AxisType.Auto, cpus))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("regime", "dtype"),
    [("near 0", "float32"), ("mixed", "float32"), ("extreme", "float32"), ("model", "bfloat16")],
)
@pytest.mark.parametrize("op", SEQUENCES)
def test_any_decay(op: str, regime: str, dtype: str, cpus: list[Any]) -> None:
    run = Run(op, "ffi")
    case = Case(1, 64, 2, 16, dtype=dtype, regime=regime)
    check(run, case, function=_sharded(run, "seq=4", AxisType.Auto, cpus))


@pytest.mark.slow
@each_native_run
def test_vmap_and_remat(run: Run, cpus: list[Any]) -> None:
    function = _sharded(run, "seq=2", AxisType.Auto, cpus)
    several = [operands(run.op, Case(1, 16, 2, 16, seed=seed)) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *several)

    def remat(**arguments: Any) -> Any:
        options = {n: arguments.pop(n) for n in ("decay", "precision", "implementation")}
        return jax.checkpoint(lambda arrays: function(**arrays, **options))(arguments)

    call = functools.partial(value_and_gradients, run, function=remat)
    found = jax.vmap(call)(*stacked)
    for i, one in enumerate(several):
        assert_right({n: x[i] for n, x in found.items()}, expected(run.op, *one))


@pytest.mark.usefixtures("unchecked_types")
def test_refusals(cpus: list[Any]) -> None:
    devices = meshes.mesh("data=2,seq=2", AxisType.Auto, cpus)
    shard, wkv7 = sharding.shard, rwkv_jax.wkv7
    refused: list[tuple[Any, dict[str, Any], str]] = [
        (wkv7, {"batch": "rows"}, "wkv7: batch is 'rows'; accepted are 'data', 'seq'"),
        (wkv7, {"batch": "data", "heads": "data"}, "wkv7: heads is 'data', and batch is 'data'"),
        (rwkv_jax.wkv4_step, {"sequence": "seq"}, "wkv4_step: sequence is 'seq'; accepted is None"),
    ]
    for operator, axes, message in refused:
        with pytest.raises(ValueError, match=message):
            shard(operator, devices, **axes)
    no_names: list[tuple[Any, dict[str, Any], str]] = [
        (devices, {"heads": 3}, "heads is 3; accepted are a name, a tuple and None"),
        (5, {}, "mesh is a int; accepted is a jax.sharding.Mesh"),
    ]
    for mesh, axes, message in no_names:
        with pytest.raises(TypeError, match=f"wkv7: {message}"):
            shard(wkv7, mesh, **axes)
    with pytest.raises(ValueError, match="mesh is None and no mesh is set"):
        shard(wkv7, batch="data")
    with pytest.raises(TypeError, match=r"operator is .*; accepted are (\w+, )*wkv4, "):
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


# Segments of a sequence over several devices.

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

MESHES_OF_SEGMENTS = [
    ("wkv7", "seq=4", AxisType.Auto),
    ("wkv6", "data=2,seq=2", AxisType.Explicit),
    ("wkv5", "outer=2,inner=2", AxisType.Auto),
    ("wkv4", "seq=4", AxisType.Explicit),
    ("wkv7", "model=2,seq=2", AxisType.Auto),
    ("wkv7", "data=2,model=2", AxisType.Auto),
    ("wkv4", "data=2,seq=2", AxisType.Explicit),
    ("wkv4", "outer=2,inner=2", AxisType.Explicit),
]
"""Each mesh twice, with the two operators that differ most."""


@pytest.mark.parametrize(("op", "mesh", "axis_type"), MESHES_OF_SEGMENTS)
def test_segments(op: str, mesh: str, axis_type: AxisType, cpus: list[Any]) -> None:
    case = Case(len(IDS), 64, 2, 16, state=axis_type == AxisType.Auto or mesh == "seq=4")
    check(FAST[op], case, function=_sharded(FAST[op], mesh, axis_type, cpus), segment_ids=IDS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "ids"),
    [*((op, None) for op in ("wkv7", "wkv5", "wkv4")), *((op, IDS) for op in ("wkv7", "wkv4"))],
)
def test_splits_on_each_device(
    op: str, ids: np.ndarray | None, cpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device splits its part of the sequence, as a large GPU does that has few heads. Segments
    cross the splits as well."""
    internals.split_on_each_device(monkeypatch)
    ids = None if ids is None else np.repeat(ids, 6, axis=1)
    case = Case(1 if ids is None else len(ids), 3 * internals.CHUNK * 2, 1, 16)
    function = _sharded(FAST[op], "seq=2", AxisType.Auto, cpus)
    check(FAST[op], case, function=function, segment_ids=ids)


@pytest.mark.slow
def test_bytes_exchanged_for_segments(cpus: list[Any]) -> None:
    """Each row costs a few integers more than a row without segments."""
    run, batch = FAST["wkv7"], 2
    function = _sharded(run, "seq=4", AxisType.Auto, cpus)

    def bytes_of(tokens: int, packed: bool) -> int:
        ids = np.ones((batch, tokens), np.int32) if packed else None
        arrays = operands(run.op, Case(batch, tokens, 1, 16))
        lowered = value_and_gradients.lower(run, *arrays, function=function, segment_ids=ids)
        return hlo.exchanged(lowered.compile().as_text())

    found = [bytes_of(tokens, True) for tokens in (64, 1024)]
    assert found[0] == found[1]
    assert 0 <= found[0] - bytes_of(64, False) <= 64 * batch
