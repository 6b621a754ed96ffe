"""`rwkv_jax.sharding`: batch, heads and sequence over the axes of a mesh. Forced CPU devices."""

import math
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
from support.operators import SEQUENCES, STEPS, Run, flat, library, runs

CASE = Case(4, 32, 4, 16)
RUNS = [x for x in runs(CASE, platform="cpu") if x.values[0].implementation != "xla"]
NATIVE = [x for x in RUNS if x.values[0].implementation == "ffi"]
XLA = Run("wkv7", "xla")
"""It differs only in what each device runs, and compiles slowly."""

each_run = pytest.mark.parametrize("run", RUNS)
each_native_run = pytest.mark.parametrize("run", NATIVE)

PLACES: dict[str, Any] = {
    "data=2,seq=2": {"batch": "data", "sequence": "seq"},
    "model=2,seq=2": {"heads": "model", "sequence": "seq"},
    "data=2,model=2": {"batch": "data", "heads": "model"},
    "seq=4": {"sequence": "seq"},
    "outer=2,inner=2": {"sequence": ("outer", "inner")},
}

MIXES = [
    ("data=2,seq=2", AxisType.Auto, True),
    ("model=2,seq=2", AxisType.Explicit, True),
    ("data=2,model=2", AxisType.Explicit, False),
    ("seq=4", AxisType.Auto, False),
    ("outer=2,inner=2", AxisType.Auto, True),
]
"""Each mesh once, and all kinds of axes and checks."""


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


def _public(op: str) -> Callable[..., Any]:
    return getattr(rwkv_jax, op)


def _value_and_gradients(
    run: Run, function: Callable[..., Any], inputs: dict, cotangents: dict
) -> dict[str, jax.Array]:
    call = flat(run.op, function)
    names = run.operator.results
    results, vjp = jax.vjp(lambda inputs: call(**inputs, **_options(run)), inputs)
    given = tuple(_typed_as(cotangents[f"d{n}"], x) for n, x in zip(names, results, strict=True))
    (gradients,) = vjp(given)
    found = dict(zip(names, results, strict=True))
    return found | {f"d{name}": x for name, x in gradients.items()}


def _typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    mesh = jax.typeof(like).sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.sharding.reshard(x, jax.typeof(like).sharding)


def _expected(run: Run, case: Case) -> tuple[dict, dict, dict]:
    case = run.operator.suited(case)
    inputs, cotangents = run.operator.make(case)
    decay = run.operator.decays[-1]
    return inputs, cotangents, run.operator.oracle(inputs, decay, cotangents)


def _assert_right(found: dict, expected: dict) -> None:
    found = {name: np.asarray(x) for name, x in found.items()}
    tolerance.assert_close(found, {n: expected[n] for n in found}, tolerance.EXACT_FLOAT32)


@each_run
@pytest.mark.parametrize(("mesh", "axis_type", "check_vma"), MIXES)
def test_shard(run: Run, mesh: str, axis_type: AxisType, check_vma: bool, cpus: list[Any]) -> None:
    """Values and all gradients, those of parameters and of the replicated state among them."""
    places = PLACES[mesh]
    devices = _mesh(mesh, axis_type, cpus)
    function = sharding.shard(_public(run.op), devices, **places, check_vma=check_vma)
    inputs, cotangents, expected = _expected(run, CASE)
    call = jax.jit(lambda *operands: _value_and_gradients(run, function, *operands))
    compiled = call.lower(inputs, cotangents).compile()
    _assert_right(compiled(inputs, cotangents), expected)
    if run.implementation == "ffi":
        native = {f"rwkv_{run.op}_fwd_v1", f"rwkv_{run.op}_bwd_v1"}
        assert hlo.targets(compiled.as_text()) == native
    if "sequence" not in places:
        shared = bool(places["batch"] and run.operator.shared)
        assert hlo.collectives(compiled.as_text()) == ({"all-reduce"} if shared else set())


@pytest.mark.slow
@each_run
def test_parts_on_each_device(run: Run, cpus: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut further on each device, as few heads on a large GPU are."""
    monkeypatch.setattr(_over_devices, "PART", 64)
    monkeypatch.setattr(_over_devices, "ENOUGH", 1 << 30)
    case = Case(1, 3 * 64 * 2, 2, 16)
    devices = _mesh("seq=2", AxisType.Auto, cpus[:2])
    function = sharding.shard(_public(run.op), devices, sequence="seq")
    inputs, cotangents, expected = _expected(run, case)
    call = jax.jit(lambda *operands: _value_and_gradients(run, function, *operands))
    _assert_right(call(inputs, cotangents), expected)


@pytest.mark.parametrize("op", SEQUENCES)
def test_bytes_exchanged_do_not_depend_on_the_tokens(op: str, cpus: list[Any]) -> None:
    """Forward the maps of all devices; backward as many states, once; then sums."""
    run, operator, heads, size = Run(op, None), library(op), 2, 16
    devices = _mesh("seq=4", AxisType.Auto, cpus)
    function = sharding.shard(_public(op), devices, sequence="seq")
    sizes = {"B": 1, "H": heads, "C": heads * size} | dict.fromkeys("KLV", size)

    def bytes_of(axes: dict[str, str]) -> int:
        return sum(4 * math.prod(sizes[x] for x in letters) for letters in axes.values())

    def forward(inputs: dict, cotangents: dict) -> jax.Array:
        return flat(op, function)(**inputs, **_options(run))[0]

    def backward(inputs: dict, cotangents: dict) -> dict:
        return _value_and_gradients(run, function, inputs, cotangents)

    found = {}
    for tokens in (64, 4096):
        operands = run.operator.make(run.operator.suited(Case(1, tokens, heads, size)))
        found[tokens] = [
            hlo.exchanged(jax.jit(call).lower(*operands).compile().as_text())
            for call in (forward, backward)
        ]
    assert found[64] == found[4096]
    maps, states = 4 * bytes_of(operator.segments.AXES), bytes_of(operator.state)
    shared = bytes_of({n: operator.inputs[n] for n in run.operator.shared})
    assert found[64] == [maps, maps + 4 * states + 2 * states + shared]


@each_native_run
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_inside_a_shard_map_of_ones_own(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    """A loss over all tokens, differentiated inside; without a state, and with batch rows that
    another axis of the mesh distributes."""
    devices = _mesh("data=2,seq=2", axis_type, cpus)
    function = flat(run.op, sharding.sequence_parallel(_public(run.op), "seq"))
    inputs, cotangents, _ = _expected(run, Case(2, 32, 2, 16))
    inputs = {name: inputs[name] for name in run.operator.inputs}

    def loss(call: Callable[..., Any], inputs: dict, dy: jax.Array) -> jax.Array:
        return jnp.vdot(call(**inputs, **_options(run))[0], dy)

    def local(inputs: dict, dy: jax.Array) -> dict:
        return jax.grad(lambda xs: jax.lax.psum(loss(function, xs, dy), ("data", "seq")))(inputs)

    timed = P("data", "seq")
    specs = {name: P() if name in run.operator.shared else timed for name in inputs}
    placed = jax.device_put((inputs, cotangents["dy"]), _places(devices, (specs, timed)))
    call = jax.shard_map(local, mesh=devices, in_specs=(specs, timed), out_specs=specs)
    expected = jax.grad(lambda xs: loss(run.operator.function, xs, cotangents["dy"]))(inputs)
    _assert_right(jax.jit(call)(*placed), expected)


def _places(mesh: Mesh, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )


@each_native_run
def test_the_mesh_that_is_set(run: Run, cpus: list[Any]) -> None:
    """And results that stay where the operands are."""
    devices = _mesh("data=2,seq=2", AxisType.Explicit, cpus)
    inputs, _, expected = _expected(run, CASE)
    with jax.set_mesh(devices):
        function = sharding.shard(_public(run.op), batch="data", sequence="seq")
        results = jax.jit(lambda xs: flat(run.op, function)(**xs, **_options(run)))(inputs)
    found = dict(zip(run.operator.results, results, strict=True))
    assert found["y"].sharding.spec[:2] == ("data", "seq")
    _assert_right(found, expected)


@pytest.mark.parametrize("run", [*NATIVE, XLA])
@pytest.mark.parametrize("case", [Case(2, 0, 2, 16), Case(0, 8, 2, 16)], ids=str)
def test_nothing(run: Run, case: Case, cpus: list[Any]) -> None:
    devices = _mesh("seq=2", AxisType.Auto, cpus[:2])
    function = sharding.shard(_public(run.op), devices, sequence="seq")
    inputs, cotangents, expected = _expected(run, case)
    found = jax.jit(lambda *xs: _value_and_gradients(run, function, *xs))(inputs, cotangents)
    _assert_right(found, expected)


@pytest.mark.slow
@each_native_run
def test_sixteen_bits(run: Run, cpus: list[Any]) -> None:
    case = Case(1, 64, 2, 16, dtype="bfloat16")
    devices = _mesh("seq=4", AxisType.Auto, cpus)
    function = sharding.shard(_public(run.op), devices, sequence="seq")
    inputs, cotangents, expected = _expected(run, case)
    found = jax.jit(lambda *xs: _value_and_gradients(run, function, *xs))(inputs, cotangents)
    limits = {n: tolerance.ceiling(n, case.dtype, sequential=True, highest=True) for n in found}
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, expected, limits)


@pytest.mark.slow
@pytest.mark.parametrize("regime", ["near 0", "mixed", "extreme"])
@pytest.mark.parametrize("op", SEQUENCES)
def test_any_decay(op: str, regime: str, cpus: list[Any]) -> None:
    run = Run(op, "ffi")
    devices = _mesh("seq=4", AxisType.Auto, cpus)
    function = sharding.shard(_public(op), devices, sequence="seq")
    case = run.operator.suited(Case(1, 64, 2, 16, decay=run.operator.decays[-1], regime=regime))
    inputs, cotangents, expected = _expected(run, case)
    found = jax.jit(lambda *xs: _value_and_gradients(run, function, *xs))(inputs, cotangents)
    _assert_right(found, expected)


@each_native_run
def test_vmap_and_remat(run: Run, cpus: list[Any]) -> None:
    devices = _mesh("seq=2", AxisType.Auto, cpus[:2])
    function = sharding.shard(_public(run.op), devices, sequence="seq")
    several = [_expected(run, Case(1, 16, 2, 16, seed=seed)) for seed in range(2)]
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *(x[:2] for x in several))

    def call(inputs: dict, cotangents: dict) -> dict:
        def remat(*operands: Any, **options: Any) -> Any:
            return jax.checkpoint(lambda *xs: function(*xs, **options))(*operands)

        return _value_and_gradients(run, remat, inputs, cotangents)

    found = jax.jit(jax.vmap(call))(*stacked)
    for i, (_, _, expected) in enumerate(several):
        _assert_right({n: x[i] for n, x in found.items()}, expected)


@pytest.mark.parametrize("op", STEPS)
def test_steps(op: str, cpus: list[Any]) -> None:
    operator = STEPS[op]
    case = operator.suited(Case(4, 1, 4, 16))
    inputs, _ = operator.make(case)
    devices = _mesh("data=2,model=2", AxisType.Explicit, cpus)
    function = flat(op, sharding.shard(_public(op), devices, batch="data", heads="model"))
    call = jax.jit(lambda xs: function(**xs, decay=case.decay, precision="highest"))
    compiled = call.lower(inputs).compile()
    found = dict(zip(operator.results, compiled(inputs), strict=True))
    _assert_right(found, operator.oracle(inputs, case.decay, None))
    assert hlo.collectives(compiled.as_text()) == set()


def test_refusals(cpus: list[Any]) -> None:
    devices = _mesh("data=2,seq=2", AxisType.Auto, cpus)
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
    with pytest.raises(TypeError, match="wkv7_step is a step; accepted are wkv4, "):
        sharding.sequence_parallel(rwkv_jax.wkv7_step, "seq")
    function = shard(wkv7, devices, batch="data", sequence="seq")
    x = jnp.zeros((2, 9, 2, 16))
    with pytest.raises(
        ValueError, match=r"wkv7: r has shape .* T = 9; accepted is a multiple of 2"
    ):
        function(x, x, x, x, x, x)
    with pytest.raises(ValueError, match="wkv7: w has shape"):
        function(x, x[:, :1], x, x, x, x)
