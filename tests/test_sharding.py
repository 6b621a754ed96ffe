"""The operators on several devices. Forced CPU devices, on a machine with GPUs as well."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from support import hlo, tolerance
from support.cases import Case
from support.operators import OPERATORS, STEPS, Run, available, runs

CASE, STEP_CASE = Case(4, 16, 4, 16), Case(4, 1, 4, 16)
RUNS = [x for x in runs(CASE, platform="cpu") if x.values[0].implementation != "xla"]
XLA = Run("wkv7", "xla")
"""It differs only in what each device runs, and compiles slowly."""

each_run = pytest.mark.parametrize("run", RUNS)
each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

PLACES = {
    "batch": ("data", None),
    "heads": (None, "model"),
    "batch and heads": ("data", "model"),
    "batch over both": (("data", "model"), None),
}


def _mesh(axis_type: AxisType, cpus: list[Any]) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=cpus)


def _labels(run: Run) -> tuple[str, ...]:
    return (*run.operator.results, *(f"d{name}" for name in run.names))


def _value_and_gradients(run: Run, *operands: jax.Array) -> tuple:
    """Results and gradients, without a loss, whose sum would be a collective of its own."""
    count = len(run.names)
    results, vjp = jax.vjp(lambda *xs: run(*xs, precision="highest"), *operands[:count])
    cotangents = tuple(map(_typed_as, operands[count:], results))
    return *results, *vjp(cotangents)


_jitted = jax.jit(_value_and_gradients, static_argnums=0)


def _typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """On an Explicit mesh a cotangent has to be sharded as its result is."""
    sharding = jax.typeof(like).sharding
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def _operands(run: Run, case: Case = CASE) -> tuple[np.ndarray, ...]:
    inputs, cotangents = run.operator.make(case)
    return (*(inputs[name] for name in run.names), *cotangents.values())


def _expected(run: Run, operands: tuple, cpu: Any) -> tuple:
    return _jitted(Run(run.op, "reference"), *jax.device_put(operands, cpu))


def _assert_alike(run: Run, results: Any, expected: Any) -> None:
    tolerance.assert_close(
        {name: np.asarray(x) for name, x in zip(_labels(run), results, strict=True)},
        {name: np.asarray(x) for name, x in zip(_labels(run), expected, strict=True)},
        tolerance.EXACT_FLOAT32,
    )


def _specs(run: Run, sequence: P, state: P, shared: P) -> tuple[P, ...]:
    """One for each operand: the inputs, the state, and the cotangents of `y` and of the state."""
    inputs = [shared if name in run.operator.shared else sequence for name in run.operator.inputs]
    states = [state] * len(run.operator.states)
    return (*inputs, *states, sequence, *states)


def _of_results(run: Run, specs: tuple[P, ...]) -> tuple[P, ...]:
    """Of the results and gradients, from those of the operands."""
    count = len(run.names)
    return (*specs[count:], *specs[:count])


def _put(mesh: Mesh, specs: tuple[P, ...], operands: tuple) -> tuple[jax.Array, ...]:
    return tuple(
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(operands, specs, strict=True)
    )


def _placed(run: Run, place: tuple) -> tuple[P, ...]:
    batch, heads = place
    return _specs(run, P(batch, None, heads), P(batch, heads), P(heads))


def _summed(run: Run, place: tuple) -> set[str]:
    """The collectives that the gradients of parameters need, which the batch shares."""
    batch, _ = place
    return {"all-reduce"} if batch and run.operator.shared else set()


@pytest.mark.parametrize(
    ("run", "place"),
    [
        *(
            pytest.param(*run.values, place, id=f"{run.id}-{name}")
            for run in RUNS
            for name, place in PLACES.items()
        ),
        pytest.param(XLA, PLACES["batch and heads"], marks=pytest.mark.slow),
    ],
)
@each_mesh
def test_batch_and_heads_need_no_collective(
    run: Run, axis_type: AxisType, place: tuple, cpus: list[Any]
) -> None:
    mesh, operands, specs = _mesh(axis_type, cpus), _operands(run), _placed(run, place)
    placed = _put(mesh, specs, operands)
    compiled = _jitted.lower(run, *placed).compile()
    results = compiled(*placed)
    _assert_alike(run, results, _expected(run, operands, cpus[0]))

    text = compiled.as_text()
    assert hlo.collectives(text) == _summed(run, place)
    native = {f"rwkv_{run.op}_fwd_v1", f"rwkv_{run.op}_bwd_v1"}
    assert hlo.targets(text) == (native if run.implementation == "ffi" else set())
    for name, x, spec in zip(_labels(run), results, _of_results(run, specs), strict=True):
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim), name


@each_run
@each_mesh
def test_sharded_time_is_gathered(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands(run)
    placed = _put(mesh, _specs(run, P("data", "model"), P("data"), P()), operands)
    _assert_alike(run, _jitted(run, *placed), _expected(run, operands, cpus[0]))


@pytest.mark.parametrize("run", [x for x in RUNS if x.values[0].op != "wkv4"])
@each_mesh
def test_sharded_channels_are_refused(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    if axis_type == AxisType.Auto and run.implementation == "reference":
        pytest.skip("left to the compiler, which gathers them")
    mesh, operands = _mesh(axis_type, cpus), _operands(run)
    last = P("data", None, None, "model")
    placed = _put(mesh, _specs(run, last, last, P(None, "model")), operands)
    explicit = axis_type == AxisType.Explicit
    kind = ValueError if explicit else jax.errors.JaxRuntimeError
    with pytest.raises(kind, match=rf"{run.op}: r \[B, T, H, K\] is sharded along K over 'model'"):
        _jitted(run, *placed)


@each_run
@each_mesh
@pytest.mark.parametrize("replicated", ["w", "the state"])
def test_operands_that_are_sharded_differently(
    run: Run, axis_type: AxisType, replicated: str, cpus: list[Any]
) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands(run)
    placed = list(_put(mesh, _placed(run, ("data", "model")), operands))
    odd = run.names.index("w") if replicated == "w" else -1 + len(run.names)
    placed[odd] = jax.device_put(operands[odd], NamedSharding(mesh, P(*[None] * placed[odd].ndim)))
    odd_places = ("model", None, "data")[: operands[0].ndim]
    placed[0] = jax.device_put(operands[0], NamedSharding(mesh, P(*odd_places)))
    _assert_alike(run, _jitted(run, *placed), _expected(run, operands, cpus[0]))


@each_run
@each_mesh
def test_uneven_batch(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    """Three sequences on two devices: replicated, since JAX does not shard them evenly."""
    mesh, operands = _mesh(axis_type, cpus), _operands(run, Case(3, 16, 4, 16))
    placed = _put(mesh, _placed(run, (None, "model")), operands)
    _assert_alike(run, _jitted(run, *placed), _expected(run, operands, cpus[0]))


@each_run
@each_mesh
def test_vmap_keeps_the_batch_where_it_is(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    several = [_operands(run, Case(4, 16, 4, 16, seed=seed)) for seed in range(2)]
    mesh = _mesh(axis_type, cpus)
    specs = [P(None, *spec) for spec in _placed(run, ("data", "model"))]
    stacked = tuple(np.stack(xs) for xs in zip(*several, strict=True))
    placed = _put(mesh, tuple(specs), stacked)
    call = jax.jit(jax.vmap(lambda *xs: _value_and_gradients(run, *xs)))
    compiled = call.lower(*placed).compile()
    results = compiled(*placed)
    for i, operands in enumerate(several):
        _assert_alike(run, [x[i] for x in results], _expected(run, operands, cpus[0]))
    if axis_type == AxisType.Auto:
        assert hlo.collectives(compiled.as_text()) == _summed(run, ("data", "model"))


def _replicated(run: Run) -> list[bool]:
    """Of each operand: `w`, the parameters and the state are the same on all devices."""
    same = {"w", *run.operator.states} | run.operator.shared
    return [name in same for name in (*run.names, *run.operator.results)]


def _local_loss(run: Run, *operands: jax.Array) -> jax.Array:
    count = len(run.names)
    results = run(*operands[:count], precision="highest")
    return jax.lax.psum(sum(map(jnp.vdot, results, operands[count:])), "data")


def _shared_operands(run: Run, cpu: Any) -> tuple[tuple, tuple]:
    """Operands of one device's batch where they are shared, and the gradients that are due."""
    operands = list(_operands(run))
    whole = list(operands)
    repeated = [
        same and name not in run.operator.shared
        for same, name in zip(_replicated(run), run.names, strict=False)
    ]
    for i in (i for i, repeat in enumerate(repeated) if repeat):
        operands[i] = operands[i][:1]
        whole[i] = np.repeat(operands[i], 4, axis=0)
    gradients = _expected(run, tuple(whole), cpu)[len(run.operator.results) :]
    due = tuple(
        g.sum(axis=0, keepdims=True) if repeat else g
        for g, repeat in zip(gradients, repeated, strict=True)
    )
    return tuple(operands), due


def _gradients_alike(run: Run, gradients: Any, due: Any) -> None:
    tolerance.assert_close(
        {name: np.asarray(x) for name, x in zip(run.names, gradients, strict=True)},
        {name: np.asarray(x) for name, x in zip(run.names, due, strict=True)},
        tolerance.EXACT_FLOAT32,
    )


@each_run
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_replicated_operands_through_shard_map(
    run: Run, check_vma: bool, cpus: list[Any]
) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    operands, due = _shared_operands(run, cpus[0])
    loss = jax.shard_map(
        lambda *xs: _local_loss(run, *xs),
        mesh=mesh,
        in_specs=tuple(P() if same else P("data") for same in _replicated(run)),
        out_specs=P(),
        check_vma=check_vma,
    )
    gradients = jax.jit(jax.grad(loss, argnums=range(len(due))))(*operands)
    _gradients_alike(run, gradients, due)


@each_run
def test_gradients_of_replicated_operands_inside_shard_map(run: Run, cpus: list[Any]) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    operands, due = _shared_operands(run, cpus[0])

    def local(*operands: jax.Array) -> tuple[jax.Array, ...]:
        gradient = jax.grad(lambda *xs: _local_loss(run, *xs), argnums=range(len(due)))
        return gradient(*operands)

    specs = tuple(P() if same else P("data") for same in _replicated(run))
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[: len(due)])
    _gradients_alike(run, jax.jit(call)(*operands), due)


@each_run
def test_results_vary_as_the_operands_do(run: Run, cpus: list[Any]) -> None:
    """A result typed as if it were the same on all devices could leave a shard_map as such."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    call = jax.shard_map(
        lambda *xs: run(*xs[: len(run.names)], precision="highest")[:2],
        mesh=mesh,
        in_specs=_specs(run, P("data"), P("data"), P()),
        out_specs=(P("data"), P()),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(call, *_operands(run))


@each_run
@each_mesh
def test_manual_over_one_axis_of_two(run: Run, axis_type: AxisType, cpus: list[Any]) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands(run)
    placed = _put(mesh, _placed(run, ("data", "model")), operands)
    specs = _specs(run, P("data"), P("data"), P())
    call = jax.shard_map(
        lambda *xs: _value_and_gradients(run, *xs),
        mesh=mesh,
        in_specs=specs,
        out_specs=_of_results(run, specs),
        axis_names={"data"},
    )
    _assert_alike(run, jax.jit(call)(*placed), _expected(run, operands, cpus[0]))


@pytest.mark.parametrize(
    ("op", "implementation"), [(op, x) for op in STEPS for x in available(op, STEP_CASE, "cpu")]
)
@each_mesh
def test_step_needs_no_collective(
    op: str, implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    inputs, _ = OPERATORS[op].make(STEP_CASE)
    mesh = _mesh(axis_type, cpus)
    placed = {
        name: jax.device_put(
            x,
            NamedSharding(mesh, P("model") if name in OPERATORS[op].shared else P("data", "model")),
        )
        for name, x in inputs.items()
    }

    def step(inputs: dict) -> tuple[jax.Array, ...]:
        function = OPERATORS[op].function
        return function(**inputs, precision="highest", implementation=implementation)

    compiled = jax.jit(step).lower(placed).compile()
    expected = jax.jit(step)(jax.device_put(inputs, cpus[0]))
    for x, right in zip(compiled(placed), expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-5)
    assert hlo.collectives(compiled.as_text()) == set()
