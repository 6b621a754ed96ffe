"""Models whose tokens are distributed over devices. Forced CPU devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import sharding, wkv7
from rwkv_jax.models import Kernels, rwkv7
from support import hlo, internals, meshes
from support.models import VOCABULARY, config_of, parameters, random_like, shapes_of
from support.tolerance import assert_trees_close

BATCH, TOKENS = 2, 52
IDS = np.array(
    [[0] * 15 + [1] * 11 + [2] * 16 + [0] * 10, [3] * 13 + [4] * 3 + [0] * 10 + [4] * 26], np.int32
)
"""Documents that begin at a cut, cross cuts, and begin after a device with padding alone."""

CONFIG = config_of(rwkv7)
HEADS = CONFIG.hidden_size // CONFIG.head_size


KERNELS = {
    *internals.norm_shift_mix._function(6, has_origin=False).targets,
    *internals.wkv7_keys.FUNCTION.targets,
    *internals.value_residual.FUNCTION.targets,
    *internals.projected_read_out.RESTORING.targets,
    *internals.feed_forward.TARGETS.values(),
    internals.low_rank_maps.TARGET,
}
"""Those of layer functions in a program with gradients, but for `keyed_wkv7`."""


def _kernels(axes: str, mesh: Any) -> Kernels:
    return Kernels(wkv=sharding.shard(wkv7, mesh, **meshes.PLACES[axes]))


def _loss(
    params: Any, state: Any, tokens: Any, ids: Any, kernels: Kernels | None = None
) -> tuple[jax.Array, Any]:
    """A loss of all documents and states, which all parameters change, and what it is made of."""
    x, after = rwkv7.hidden_states(params, tokens, state, segment_ids=ids, kernels=kernels)
    x = jnp.where(ids[..., None] != 0, x, 0)
    sums = jax.tree.map(lambda x: jnp.sum(jnp.sin(3 * x)), (x, after))
    return jax.tree.reduce(jnp.add, sums), (x, after)


def _results(*operands: Any, kernels: Kernels | None = None) -> Any:
    """Hidden states and next states, and the gradients of parameters and of states."""
    call = functools.partial(_loss, kernels=kernels)
    return jax.value_and_grad(call, argnums=(0, 1), has_aux=True)(*operands)


@pytest.fixture(scope="module")
def operands() -> tuple[Any, ...]:
    params = parameters(rwkv7)
    state = random_like(rwkv7.initial_state(params, BATCH), seed=2)
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, (BATCH, TOKENS)).astype(np.int32)
    return params, state, tokens, IDS


@pytest.fixture(scope="module")
def expected(operands: tuple[Any, ...]) -> Any:
    return jax.jit(_results)(*operands)


@pytest.mark.parametrize(
    ("axes", "axis_type"),
    [
        ("seq=4", AxisType.Auto),
        ("data=2,seq=2", AxisType.Explicit),
        ("model=2,seq=2", AxisType.Auto),
    ],
)
def test_equals_one_device(
    axes: str, axis_type: AxisType, operands: Any, expected: Any, cpus: list[Any]
) -> None:
    """Hidden states, next states and all gradients. What is exchanged along the sequence are single
    tokens, transitions and cotangents of states, and sums of gradients."""
    mesh = meshes.mesh(axes, axis_type, cpus)
    data, model = (name if name in mesh.shape else None for name in ("data", "model"))
    params, state, *of_tokens = operands
    placed = (
        jax.device_put(params, rwkv7.shardings(params, mesh, model=model)),
        jax.device_put(state, NamedSharding(mesh, P(data))),
        *jax.device_put(of_tokens, NamedSharding(mesh, P(data, "seq"))),
    )
    call = jax.jit(functools.partial(_results, kernels=_kernels(axes, mesh)))
    compiled = call.lower(*placed).compile()
    found = jax.tree.map(np.asarray, compiled(*placed))
    assert_trees_close(found, expected, 1e-4)

    text, devices = compiled.as_text(), mesh.shape["seq"]
    assert hlo.targets(text) == internals.targets("wkv7", "fwd", "bwd")
    rows, heads = BATCH // mesh.shape.get("data", 1), HEADS // mesh.shape.get("model", 1)
    exchanged = hlo.exchanged_by(text)
    assert exchanged.keys() == {"all-gather", "all-reduce", "collective-permute"}
    few = 4 * devices * rows  # a number of each row, of each device
    permuted, gathered = (
        [size for size in exchanged[kind] if size > few]
        for kind in ("collective-permute", "all-gather")
    )
    shifts = 2 * CONFIG.num_layers
    assert permuted == [4 * rows * CONFIG.hidden_size] * 3 * shifts
    of_heads = 4 * rows * heads * CONFIG.head_size**2
    assert gathered == [devices * of_heads] * 3 * CONFIG.num_layers
    activations = 4 * rows * TOKENS // devices * CONFIG.hidden_size
    assert model or activations not in exchanged["all-reduce"]


def test_kernels_get_the_tokens_of_a_device(
    cpus: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program for GPUs has the kernels of layer functions, and calls each with the tokens of one
    device."""
    calls = set()

    def call(target: str, results: Any, *operands: jax.Array, **_: Any) -> tuple[jax.Array, ...]:
        calls.add((target, operands[0].shape[:2]))
        nothing = 0 * operands[0].ravel()[0]  # which differs between devices, as results do
        return tuple(jnp.zeros(shape, dtype) + nothing.astype(dtype) for shape, dtype in results)

    internals.pretend(monkeypatch, "cuda", None)
    internals.run_as_on_cuda(monkeypatch, internals.native_module("cuda"), call)
    for module in (internals.feed_forward, internals.low_rank_maps):
        monkeypatch.setattr(module, "MIN_TOKENS", 0)
    config = rwkv7.Config(num_layers=2, hidden_size=512, vocab_size=32)
    params = shapes_of(rwkv7, config)
    mesh = meshes.mesh("seq=4", AxisType.Auto, cpus)
    tokens = jax.ShapeDtypeStruct((2, 64), jnp.int32, sharding=NamedSharding(mesh, P(None, "seq")))

    @jax.grad
    def gradients(params: Any, tokens: Any) -> jax.Array:
        kernels = _kernels("seq=4", mesh)
        x, _ = rwkv7.hidden_states(params, tokens, dtype=jnp.bfloat16, kernels=kernels)
        return jnp.sum(x.astype(jnp.float32))

    lowered = jax.jit(gradients).lower(params, tokens)
    calls.clear()  # for whole sequences, from which the compiler makes those of devices
    lowered.compile()
    assert calls == {(target, (2, 16)) for target in KERNELS}
