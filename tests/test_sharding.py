"""The operators on several devices. Forced CPU devices, on a machine with GPUs as well."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import hlo
import rwkv_jax
import tolerance
from cases import Case
from operators import available

CASE = Case(4, 16, 4, 16)
NAMES = ("r", "w", "k", "v", "a", "b", "initial_state")
RESULTS = ("y", "final_state", *(f"d{name}" for name in NAMES))
AVAILABLE = available("wkv7", CASE, platform="cpu")

each_implementation = pytest.mark.parametrize("implementation", AVAILABLE)
each_mesh = pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)

PLACES = {
    "batch": ("data", None),
    "heads": (None, "model"),
    "batch and heads": ("data", "model"),
    "batch over both": (("data", "model"), None),
}


def _mesh(axis_type: AxisType, cpus: list[Any]) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=cpus)


def _value_and_gradients(implementation: str | None, *operands: jax.Array) -> tuple:
    """Results and gradients, without a loss, whose sum would be a collective of its own."""
    *inputs, dy, dstate = operands

    def call(*inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rwkv_jax.wkv7(
            *inputs, decay="sigmoid", precision="highest", implementation=implementation
        )

    results, vjp = jax.vjp(call, *inputs)
    cotangents = tuple(map(_typed_as, (dy, dstate), results))
    return *results, *vjp(cotangents)


def _typed_as(x: jax.Array, like: jax.Array) -> jax.Array:
    """On an Explicit mesh a cotangent has to be sharded as its result is."""
    sharding = jax.typeof(like).sharding
    return x if jax.typeof(x).sharding == sharding else jax.sharding.reshard(x, sharding)


def _operands(case: Case = CASE) -> tuple[np.ndarray, ...]:
    inputs, cotangents = cases.wkv7(case)
    return (*inputs.values(), *cotangents.values())


def _expected(operands: tuple, cpu: Any) -> tuple:
    call = jax.jit(_value_and_gradients, static_argnums=0)
    return call("reference", *jax.device_put(operands, cpu))


def _assert_alike(results: Any, expected: Any) -> None:
    tolerance.assert_close(
        {name: np.asarray(x) for name, x in zip(RESULTS, results, strict=True)},
        {name: np.asarray(x) for name, x in zip(RESULTS, expected, strict=True)},
        tolerance.EXACT_FLOAT32,
    )


def _put(mesh: Mesh, place: tuple, operands: tuple) -> tuple[tuple, list[NamedSharding]]:
    batch, heads = place
    specs = [
        P(batch, heads, None, None) if i in (6, 8) else P(batch, None, heads, None)
        for i in range(9)
    ]
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    return tuple(jax.device_put(x, s) for x, s in zip(operands, shardings, strict=True)), shardings


@each_implementation
@each_mesh
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_batch_and_heads_need_no_collective(
    implementation: str, axis_type: AxisType, place: tuple, cpus: list[Any]
) -> None:
    operands = _operands()
    placed, shardings = _put(_mesh(axis_type, cpus), place, operands)
    compiled = (
        jax.jit(_value_and_gradients, static_argnums=0).lower(implementation, *placed).compile()
    )
    results = compiled(*placed)
    _assert_alike(results, _expected(operands, cpus[0]))

    text = compiled.as_text()
    assert hlo.collectives(text) == set()
    native = {"rwkv_wkv7_fwd_v1", "rwkv_wkv7_bwd_v1"} if implementation == "ffi" else set()
    assert hlo.targets(text) == native
    sequence, state = shardings[0], shardings[6]
    for name, x in zip(RESULTS, results, strict=True):
        assert x.sharding.is_equivalent_to(state if "state" in name else sequence, 4), name


@each_implementation
@each_mesh
def test_sharded_time_is_gathered(
    implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands()
    sequence, state = NamedSharding(mesh, P("data", "model")), NamedSharding(mesh, P("data"))
    placed = [jax.device_put(x, state if i in (6, 8) else sequence) for i, x in enumerate(operands)]
    results = jax.jit(_value_and_gradients, static_argnums=0)(implementation, *placed)
    _assert_alike(results, _expected(operands, cpus[0]))


@each_implementation
@each_mesh
def test_sharded_channels_are_gathered(
    implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands()
    last = NamedSharding(mesh, P("data", None, None, "model"))
    placed = [jax.device_put(x, last) for x in operands]
    results = jax.jit(_value_and_gradients, static_argnums=0)(implementation, *placed)
    _assert_alike(results, _expected(operands, cpus[0]))


@each_implementation
@each_mesh
@pytest.mark.parametrize("replicated", ["w", "initial_state"])
def test_operands_that_are_sharded_differently(
    implementation: str, axis_type: AxisType, replicated: str, cpus: list[Any]
) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands()
    placed = list(_put(mesh, ("data", "model"), operands)[0])
    odd = NAMES.index(replicated)
    placed[odd] = jax.device_put(operands[odd], NamedSharding(mesh, P(None, None, None, None)))
    placed[0] = jax.device_put(operands[0], NamedSharding(mesh, P("model", None, "data", None)))
    results = jax.jit(_value_and_gradients, static_argnums=0)(implementation, *placed)
    _assert_alike(results, _expected(operands, cpus[0]))


@each_implementation
@each_mesh
def test_uneven_batch(implementation: str, axis_type: AxisType, cpus: list[Any]) -> None:
    """Three sequences on two devices: replicated, since JAX does not shard them evenly."""
    mesh, operands = _mesh(axis_type, cpus), _operands(Case(3, 16, 4, 16))
    placed, _ = _put(mesh, (None, "model"), operands)
    results = jax.jit(_value_and_gradients, static_argnums=0)(implementation, *placed)
    _assert_alike(results, _expected(operands, cpus[0]))


@each_implementation
@each_mesh
def test_vmap_keeps_the_batch_where_it_is(
    implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    several = [_operands(Case(4, 16, 4, 16, seed=seed)) for seed in range(2)]
    mesh = _mesh(axis_type, cpus)
    sequence = NamedSharding(mesh, P(None, "data", None, "model", None))
    state = NamedSharding(mesh, P(None, "data", "model", None, None))
    placed = tuple(
        jax.device_put(np.stack(xs), state if i in (6, 8) else sequence)
        for i, xs in enumerate(zip(*several, strict=True))
    )
    call = jax.jit(jax.vmap(lambda *xs: _value_and_gradients(implementation, *xs)))
    compiled = call.lower(*placed).compile()
    results = compiled(*placed)
    for i, operands in enumerate(several):
        _assert_alike([x[i] for x in results], _expected(operands, cpus[0]))
    if axis_type == AxisType.Auto:
        assert hlo.collectives(compiled.as_text()) == set()


def _shared(*operands: jax.Array, mesh: Mesh, check_vma: bool, implementation: str) -> jax.Array:
    """A loss whose `w` and `initial_state` are the same on all devices along "data"."""

    def local(*operands: jax.Array) -> jax.Array:
        *inputs, dy, dstate = operands
        y, state = rwkv_jax.wkv7(
            *inputs, decay="sigmoid", precision="highest", implementation=implementation
        )
        return jax.lax.psum(jnp.vdot(y, dy) + jnp.vdot(state, dstate), "data")

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(P() if i in (1, 6) else P("data") for i in range(9)),
        out_specs=P(),
        check_vma=check_vma,
    )(*operands)


def _shared_operands(cpu: Any) -> tuple[tuple, tuple]:
    """Operands of one device's batch where they are shared, and the gradients that are due."""
    operands = list(_operands())
    whole = list(operands)
    for i in (1, 6):
        operands[i] = operands[i][:1]
        whole[i] = np.repeat(operands[i], 4, axis=0)
    _, _, *gradients = _expected(tuple(whole), cpu)
    due = tuple(g.sum(axis=0, keepdims=True) if i in (1, 6) else g for i, g in enumerate(gradients))
    return tuple(operands), due


def _gradients_alike(gradients: Any, due: Any) -> None:
    tolerance.assert_close(
        {name: np.asarray(x) for name, x in zip(NAMES, gradients, strict=True)},
        {name: np.asarray(x) for name, x in zip(NAMES, due, strict=True)},
        tolerance.EXACT_FLOAT32,
    )


@each_implementation
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_of_replicated_operands_through_shard_map(
    implementation: str, check_vma: bool, cpus: list[Any]
) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    operands, due = _shared_operands(cpus[0])

    def loss(*operands: jax.Array) -> jax.Array:
        return _shared(*operands, mesh=mesh, check_vma=check_vma, implementation=implementation)

    gradients = jax.jit(jax.grad(loss, argnums=range(7)))(*operands)
    _gradients_alike(gradients, due)


@each_implementation
def test_gradients_of_replicated_operands_inside_shard_map(
    implementation: str, cpus: list[Any]
) -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    operands, due = _shared_operands(cpus[0])

    def local(*operands: jax.Array) -> tuple[jax.Array, ...]:
        def loss(*inputs: jax.Array) -> jax.Array:
            y, state = rwkv_jax.wkv7(
                *inputs, decay="sigmoid", precision="highest", implementation=implementation
            )
            return jax.lax.psum(jnp.vdot(y, operands[7]) + jnp.vdot(state, operands[8]), "data")

        return jax.grad(loss, argnums=range(7))(*operands[:7])

    specs = tuple(P() if i in (1, 6) else P("data") for i in range(9))
    call = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs[:7])
    _gradients_alike(jax.jit(call)(*operands), due)


@each_implementation
def test_results_vary_as_the_operands_do(implementation: str, cpus: list[Any]) -> None:
    """A result typed as if it were the same on all devices could leave a shard_map as such."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=cpus)
    call = jax.shard_map(
        lambda *xs: _value_and_gradients(implementation, *xs)[:2],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P("data"), P()),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(call, *_operands())


@each_implementation
@each_mesh
def test_manual_over_one_axis_of_two(
    implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    mesh, operands = _mesh(axis_type, cpus), _operands()
    placed, _ = _put(mesh, ("data", "model"), operands)
    call = jax.shard_map(
        lambda *xs: _value_and_gradients(implementation, *xs),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    _assert_alike(jax.jit(call)(*placed), _expected(operands, cpus[0]))


@each_implementation
@each_mesh
def test_step_needs_no_collective(
    implementation: str, axis_type: AxisType, cpus: list[Any]
) -> None:
    inputs, _ = cases.wkv7_step(Case(4, 1, 4, 16))
    sharding = NamedSharding(_mesh(axis_type, cpus), P("data", "model"))
    placed = {name: jax.device_put(x, sharding) for name, x in inputs.items()}

    def step(inputs: dict) -> tuple[jax.Array, jax.Array]:
        return rwkv_jax.wkv7_step(**inputs, precision="highest", implementation=implementation)

    compiled = jax.jit(step).lower(placed).compile()
    expected = jax.jit(step)(jax.device_put(inputs, cpus[0]))
    for x, right in zip(compiled(placed), expected, strict=True):
        np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-5)
    assert hlo.collectives(compiled.as_text()) == set()
