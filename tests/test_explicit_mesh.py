"""Models on an Explicit mesh, operators and losses on one without `jit`, and where the states of
models are."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import generation, losses, models, serving, sharding, wkv7
from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from support import cases, meshes
from support.models import VOCABULARY, config_of, parameters, random_like, shapes_of
from support.operators import OPERATORS, SEQUENCES, STEPS
from support.tolerance import assert_trees_close

TOKENS = np.arange(4 * 9, dtype=np.int32).reshape(4, 9) % VOCABULARY


@pytest.fixture
def mesh(cpus: list[Any]) -> Mesh:
    return meshes.mesh("data=2,model=2", AxisType.Explicit, cpus)


@pytest.fixture(scope="module")
def params() -> rwkv7.Params:
    return random_like(shapes_of(rwkv7, config_of(rwkv7, num_layers=1)))


def placed(module: ModuleType, params: Any, mesh: Mesh, where: str) -> Any:
    """The parameters on no mesh, whole on each device, or distributed along "model"."""
    if where == "nowhere":
        return params
    axes = {"model": "model"} if where == "model" else {}
    return jax.device_put(params, module.shardings(params, mesh, **axes))


def tokens_on(mesh: Mesh) -> jax.Array:
    return jax.device_put(TOKENS, NamedSharding(mesh, P("data")))


@pytest.mark.parametrize(
    "module", [rwkv4, rwkv5, rwkv6, rwkv7], ids=lambda module: module.GENERATION.name
)
@pytest.mark.slow
def test_loss_and_gradients(module: ModuleType, mesh: Mesh) -> None:
    """Only the second block of RWKV-7 differs from the first one by more than a norm."""
    config = config_of(module, num_layers=2 if module is rwkv7 else 1)
    params = random_like(shapes_of(module, config))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = module.hidden_states(params, tokens)
        return losses.cross_entropy(x[:, :-1], params.head.weight, tokens[:, 1:])

    of_loss = jax.jit(jax.value_and_grad(loss))
    expected = of_loss(params, TOKENS)
    for where in ("model", "nowhere", "everywhere") if module is rwkv7 else ("model",):
        found = of_loss(placed(module, params, mesh, where), tokens_on(mesh))
        assert_trees_close(found, expected, 1e-4)


@pytest.mark.slow
def test_without_jit(params: rwkv7.Params, mesh: Mesh) -> None:
    on_mesh = placed(rwkv7, params, mesh, "model")
    logits, state = rwkv7.apply(on_mesh, tokens_on(mesh))
    assert jax.typeof(logits).sharding.spec == P("data", None, None)
    assert jax.typeof(state[0].att.wkv).sharding.spec == P("data", None, None, None)
    assert_trees_close(np.asarray(logits), rwkv7.apply(params, TOKENS)[0], 1e-4)
    x = jax.device_put(jnp.ones((4, 9, 32)), NamedSharding(mesh, P("data")))
    for mix, of_block in ((rwkv7.time_mix, "att"), (rwkv7.channel_mix, "ffn")):
        found = mix(getattr(on_mesh.blocks[0], of_block), x)
        expected = mix(getattr(params.blocks[0], of_block), jnp.ones((4, 9, 32)))
        assert_trees_close(jax.tree.map(np.asarray, found), expected, 1e-4)


def _assert_same_as_on_the_host(call: Callable[..., Any], mesh: Mesh, *operands: Any) -> None:
    """Results, all of which are on the mesh, and the gradients of all operands."""
    found, pullback = jax.vjp(call, *operands)
    right, of_host = jax.vjp(call, *jax.tree.map(np.asarray, operands))
    assert {x.sharding.mesh for x in found} == {mesh}
    on_mesh = jax.tree.map(np.asarray, (tuple(found), pullback(found)))
    assert_trees_close(on_mesh, (tuple(right), of_host(right)), 1e-5)


@pytest.mark.parametrize("op", ["wkv7", "wkv4", "wkv6_step"])
def test_an_operator_without_jit(op: str, mesh: Mesh) -> None:
    """Inputs of tokens are on the mesh; shared ones, states and ids of segments are not, or are
    made on the way."""
    operator = OPERATORS[op]
    case = cases.Case(4, 1 if op in STEPS else 5, 2, 16)
    inputs, _ = operator.make(case)
    options: dict[str, Any] = {"decay": operator.decays[-1]}
    if op in SEQUENCES:
        options["segment_ids"] = jnp.asarray([[1, 1, 2, 2, 0]] * 4)
    heads = P("data", "model") if op in STEPS else P("data", None, "model")
    timed = jax.device_put({n: inputs[n] for n in operator.timed}, NamedSharding(mesh, heads))
    without = {n: jnp.asarray(inputs[n]) for n in operator.shared}
    states = {n: jnp.asarray(inputs[n]) for n in operator.states}

    def call(timed: Any, given: Any) -> Any:
        return operator.function(**timed, **given, **options)

    for given in (without, without | states) if op in SEQUENCES else (without | states,):
        _assert_same_as_on_the_host(call, mesh, timed, given)


def test_a_loss_without_jit(mesh: Mesh) -> None:
    """The weight is on no mesh, and the mask of all tokens is made on the way."""
    x = np.random.default_rng(0).standard_normal((4, 3, 8), dtype=np.float32)
    weight, targets = jnp.asarray(x[0]), jnp.asarray(TOKENS[:, :3] % 3)

    def loss(hidden_states: Any, weight: Any) -> tuple[jax.Array]:
        return (losses.cross_entropy(hidden_states, weight, targets),)

    on_mesh = jax.device_put(x, NamedSharding(mesh, P("data")))
    _assert_same_as_on_the_host(loss, mesh, on_mesh, weight)


@pytest.mark.slow
def test_an_operator_of_the_mesh(params: rwkv7.Params, mesh: Mesh) -> None:
    over_heads = sharding.shard(wkv7, mesh=mesh, batch="data", heads="model")
    of_mesh = models.Kernels(wkv=over_heads)
    on_mesh = placed(rwkv7, params, mesh, "model"), tokens_on(mesh)
    found, _ = jax.jit(lambda params, x: rwkv7.apply(params, x, kernels=of_mesh))(*on_mesh)
    assert_trees_close(np.asarray(found), rwkv7.apply(params, TOKENS)[0], 1e-4)
    with pytest.raises(
        ValueError, match=r"rwkv7: kernels has a wkv on an Explicit mesh; accepted .* jax\.jit"
    ):
        rwkv7.apply(*on_mesh, kernels=of_mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "set_mesh"),
    [(rwkv7, False), (rwkv7, True), (models.Invariant(rwkv7, 2), False)],
)
def test_generation(module: Any, set_mesh: bool, params: rwkv7.Params, mesh: Mesh) -> None:
    """Also that states keep their types from step to step."""
    prompts = [[1, 2, 3], [4]]
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        on_mesh = placed(rwkv7, params, mesh, "model")
        found = generation.generate(module, on_mesh, prompts, 5, logprobs=2)
    expected = generation.generate(module, params, prompts, 5, logprobs=2)
    assert found.tokens == expected.tokens
    assert_trees_close(found.logprobs, expected.logprobs, 1e-4)


def test_a_pool_says_what_it_takes(params: rwkv7.Params, mesh: Mesh) -> None:
    with pytest.raises(ValueError, match=r"Pool: mesh is .*; accepted .* of type Auto"):
        serving.Pool(rwkv7, params, 4, mesh=mesh, data="data")


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [False, True], ids=["in turn", "stacked"])
def test_states_are_where_parameters_are(stacked: bool, mesh: Mesh, cpus: list[Any]) -> None:
    params = rwkv7.stacked(parameters(rwkv7)) if stacked else parameters(rwkv7)
    for place in (cpus[2], NamedSharding(mesh, P())):
        on_devices = jax.device_put(params, place)
        state = jax.tree.leaves(rwkv7.initial_state(on_devices, 2))
        assert {x.sharding for x in state} == {on_devices.head.weight.sharding}
        session = generation.generate(rwkv7, on_devices, [[1]], 0).session
        assert session.logits.devices() == on_devices.head.weight.devices()
    # As before, what is on no device in particular stays so.
    assert not any(x.committed for x in jax.tree.leaves(rwkv7.initial_state(params, 2)))
