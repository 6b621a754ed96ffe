"""Calls of the operators with sharded operands. Forced CPU devices, with GPUs as well."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax.sharding import shard
from support import hlo, internals, meshes
from support.cases import Case
from support.harness import assert_right, expected, operands, results, value_and_gradients
from support.operators import STEPS, Run, available, runs

pytestmark = pytest.mark.quick("run", "op")

CASE, STEP_CASE = Case(4, 16, 4, 16), Case(4, 1, 4, 16)
# Plain XLA differs only in what each device runs, and compiles slowly.
RUNS: list[Any] = [x for x in runs(CASE, platform="cpu") if x.values[0].implementation != "xla"]
each_run = pytest.mark.parametrize("run", RUNS)
each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
some_of_both = pytest.mark.parametrize(
    ("run", "axis_type"),
    [
        pytest.param(*run.values, kind, id=f"{run.id}-{kind}", marks=run.marks)
        for i, run in enumerate(RUNS)
        for j, kind in enumerate((AxisType.Auto, AxisType.Explicit))
        if run.id == "wkv7-ffi" or (i + j) % 2
    ],
)
"""Both kinds of mesh axes for one run, and for the others one or the other: operators differ in
their axes, which the rules of either kind know by the same letters."""

PLACES = {
    "batch": ("data", None),
    "heads": (None, "model"),
    "batch and heads": ("data", "model"),
    "batch over both": (("data", "model"), None),
}


def _mesh(axis_type: AxisType, cpus: list[Any]) -> Mesh:
    return meshes.mesh("data=2,model=2", axis_type, cpus)


def _specs(run: Run, sequence: P, state: P, shared: P) -> dict[str, P]:
    """The specs of all arrays by name: inputs, results, cotangents and gradients."""
    own = run.operator
    specs = dict.fromkeys((*own.timed, "y"), sequence)
    specs |= dict.fromkeys((*own.states, *own.results[1:]), state)
    specs |= dict.fromkeys(own.shared, shared)
    return specs | {f"d{name}": spec for name, spec in specs.items()}


def _placed(run: Run, place: tuple) -> dict[str, P]:
    batch, heads = place
    return _specs(run, P(batch, None, heads), P(batch, heads), P(heads))


def _put(mesh: Mesh, specs: dict[str, P], *several: dict) -> list[dict]:
    return [meshes.put(mesh, specs, arrays) for arrays in several]


def _summed(run: Run, place: tuple) -> set[str]:
    """The collectives that the gradients of parameters need, which the batch shares."""
    batch, _ = place
    return {"all-reduce"} if batch and run.operator.shared else set()


@pytest.mark.parametrize(
    ("run", "place"),
    [
        *(
            pytest.param(*run.values, place, id=f"{run.id}-{name}", marks=run.marks)
            for run in RUNS
            for name, place in PLACES.items()
            if name == "batch and heads" or run.id in ("wkv7-ffi", "wkv5-ffi", "wkv4-ffi")
        ),
        pytest.param(Run("wkv7", "xla"), PLACES["batch and heads"], marks=pytest.mark.slow),
    ],
)
@each_mesh
def test_batch_and_heads_need_no_collective(
    run: Run, axis_type: AxisType, place: tuple, cpus: list[Any]
) -> None:
    mesh, arrays, specs = _mesh(axis_type, cpus), operands(run.op, CASE), _placed(run, place)
    placed = _put(mesh, specs, *arrays)
    compiled = value_and_gradients.lower(run, *placed).compile()
    found = compiled(*placed)
    assert_right(found, expected(run.op, *arrays))

    text = compiled.as_text()
    assert hlo.collectives(text) == _summed(run, place)
    native = internals.targets(run.op, "fwd", "bwd")
    assert hlo.targets(text) == (native if run.implementation == "ffi" else set())
    for name, x in found.items():
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, specs[name]), x.ndim), name


@pytest.mark.parametrize("run", [x for x in RUNS if x.values[0].op != "wkv4"])
@each_mesh
def test_sharded_channels_are_refused(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    if axis_type == AxisType.Auto and run.implementation == "reference":
        pytest.skip("left to the compiler, which gathers them")
    last = P("data", None, None, "model")
    specs = _specs(run, last, last, P(None, "model"))
    placed = _put(_mesh(axis_type, cpus), specs, *operands(run.op, CASE))
    explicit = axis_type == AxisType.Explicit
    kind = ValueError if explicit else jax.errors.JaxRuntimeError
    # JAX has operands in the order of their names.
    first = min(run.operator.timed)
    message = rf"{run.op}: {first} \[B, T, H, K\] is sharded along K over 'model'"
    with pytest.raises(kind, match=message):
        value_and_gradients(run, *placed)


def _elsewhere(run: Run, replicated: str) -> dict[str, P]:
    """The first input on other axes than the others, and one operand whole."""
    first = run.operator.inputs[0]
    ndim = operands(run.op, CASE)[0][first].ndim
    return _placed(run, ("data", "model")) | {
        replicated: P(),
        first: P(*("model", None, "data")[:ndim]),
    }


@some_of_both
@pytest.mark.parametrize(
    ("rows", "specs"),
    [
        (4, lambda run: _specs(run, P("data", "model"), P("data"), P())),
        (4, lambda run: _elsewhere(run, "w")),
        (4, lambda run: _elsewhere(run, run.operator.states[-1])),
        # Replicated, since JAX does not shard three rows evenly.
        (3, lambda run: _placed(run, (None, "model"))),
    ],
    ids=["tokens over devices", "w is whole", "the state is whole", "uneven batch"],
)
def test_operands_that_are_moved(
    run: Run, axis_type: AxisType, rows: int, specs: Callable[[Run], Any], cpus: list[Any]
) -> None:
    arrays = operands(run.op, Case(rows, 16, 4, 16))
    placed = _put(_mesh(axis_type, cpus), specs(run), *arrays)
    assert_right(value_and_gradients(run, *placed), expected(run.op, *arrays))


@some_of_both
def test_vmap_keeps_the_batch_where_it_is(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    several = [operands(run.op, Case(4, 16, 4, 16, seed=seed)) for seed in range(2)]
    specs = {name: P(None, *spec) for name, spec in _placed(run, ("data", "model")).items()}
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *several)
    placed = _put(_mesh(axis_type, cpus), specs, *stacked)
    compiled = jax.jit(jax.vmap(lambda *xs: value_and_gradients(run, *xs))).lower(*placed).compile()
    found = compiled(*placed)
    for i, arrays in enumerate(several):
        assert_right({name: x[i] for name, x in found.items()}, expected(run.op, *arrays))
    if axis_type == AxisType.Auto:
        assert hlo.collectives(compiled.as_text()) == _summed(run, ("data", "model"))


@each_run
@pytest.mark.parametrize("where", ["outside", "outside, unchecked", "inside"])
def test_gradients_of_replicated_operands(run: Run, where: str, cpus: list[Any]) -> None:
    """Differentiated outside of a `shard_map` and inside. The parameters, `w` and the state, of
    which there is one row, are the same on all devices."""
    inputs, cotangents = operands(run.op, CASE)
    of_one = [n for n in ("w", *run.operator.states) if n not in run.operator.shared]
    inputs |= {name: inputs[name][:1] for name in of_one}
    whole = inputs | {name: np.repeat(inputs[name], 4, axis=0) for name in of_one}
    right = expected(run.op, whole, cotangents)
    gradients = {name: right[f"d{name}"] for name in inputs}
    gradients |= {name: gradients[name].sum(axis=0, keepdims=True) for name in of_one}

    def loss(inputs: dict, cotangents: dict) -> jax.Array:
        found = results(run, **inputs)
        total = sum(jnp.vdot(x, cotangents[f"d{name}"]) for name, x in found.items())
        return jax.lax.psum(total, "data")

    specs = _specs(run, P("data"), P("data"), P()) | dict.fromkeys(of_one, P())
    in_specs = tuple({name: specs[name] for name in x} for x in (inputs, cotangents))
    inside = where == "inside"
    call = jax.shard_map(
        jax.grad(loss) if inside else loss,
        mesh=meshes.mesh("data=4", AxisType.Auto, cpus),
        in_specs=in_specs,
        out_specs=in_specs[0] if inside else P(),
        check_vma="unchecked" not in where,
    )
    gradient = jax.jit(call if inside else jax.grad(call))
    assert_right(gradient(inputs, cotangents), gradients)


@each_run
def test_results_vary_as_the_operands_do(run: Run, cpus: list[Any]) -> None:
    """A result typed as if it were the same on all devices could leave a shard_map as such."""
    inputs, _ = operands(run.op, CASE)
    specs = _specs(run, P("data"), P("data"), P())
    y, *states = run.operator.results
    call = jax.shard_map(
        lambda inputs: results(run, **inputs),
        mesh=meshes.mesh("data=4", AxisType.Auto, cpus),
        in_specs=({name: specs[name] for name in inputs},),
        out_specs={y: P("data")} | dict.fromkeys(states, P()),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(call, inputs)


@some_of_both
def test_manual_over_one_axis_of_two(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    mesh, arrays = _mesh(axis_type, cpus), operands(run.op, CASE)
    placed = _put(mesh, _placed(run, ("data", "model")), *arrays)
    specs = _specs(run, P("data"), P("data"), P())
    found = (*run.operator.results, *(f"d{name}" for name in run.names))
    call = jax.shard_map(
        lambda *xs: value_and_gradients(run, *xs),
        mesh=mesh,
        in_specs=tuple({name: specs[name] for name in x} for x in arrays),
        out_specs={name: specs[name] for name in found},
        axis_names={"data"},
    )
    assert_right(jax.jit(call)(*placed), expected(run.op, *arrays))


@pytest.mark.parametrize(
    ("op", "implementation"), [(op, x) for op in STEPS for x in available(op, STEP_CASE, "cpu")]
)
@each_mesh
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "shard"])
def test_step_needs_no_collective(
    op: str, implementation: str, axis_type: AxisType, sharded: bool, cpus: list[Any]
) -> None:
    """Also with `sharding.shard`."""
    run, (inputs, cotangents) = Run(op, implementation), operands(op, STEP_CASE)
    specs = {n: P("model") if n in run.operator.shared else P("data", "model") for n in inputs}
    mesh = _mesh(axis_type, cpus)
    function = shard(run.public, mesh, batch="data", heads="model") if sharded else None
    placed = meshes.put(mesh, specs, inputs)
    compiled = jax.jit(lambda xs: results(run, function, **xs)).lower(placed).compile()
    assert_right(compiled(placed), expected(op, inputs, cotangents))
    assert hlo.collectives(compiled.as_text()) == set()


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_arrays_on_no_mesh_under_one_that_is_set(
    implementation: str | None, cpus: list[Any]
) -> None:
    """Their place has no names of mesh axes; they count as replicated."""
    run = Run("wkv7", implementation)
    inputs, cotangents = operands("wkv7", Case(4, 9, 2, 16))
    with jax.set_mesh(meshes.mesh("data=4", AxisType.Auto, cpus)):
        found = jax.jit(lambda xs: results(run, **xs))(inputs)
    assert_right(found, expected("wkv7", inputs, cotangents))


def test_what_runs_in_a_program_of_one_device(cpus: list[Any]) -> None:
    """Not in one for more devices, also where tracing does not tell; nor under an Explicit mesh,
    whose types would not admit it, nor under `vmap`."""

    @jax.jit
    def chosen(x: jax.Array) -> jax.Array:
        joined, apart = lambda x: (x.reshape(-1) * 3).reshape(x.shape), lambda x: x * 3
        return internals.in_program_of_one_device(joined, apart, x)

    x, specs = jnp.arange(8.0).reshape(2, 4), {"x": P("data", "model")}
    assert "reshape" in chosen.lower(x).as_text()
    kinds = AxisType.Auto, AxisType.Explicit
    on_meshes = [meshes.put(_mesh(kind, cpus), specs, {"x": x})["x"] for kind in kinds]
    assert not any("reshape" in chosen.lower(placed).as_text() for placed in on_meshes)
    for found in (chosen(x), *map(chosen, on_meshes), jax.vmap(chosen)(x[None])[0]):
        np.testing.assert_array_equal(found, x * 3)
