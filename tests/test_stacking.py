"""The stacked form of the RWKV-7 model against the form with a tuple of blocks."""

import argparse
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from rwkv_jax.models import rwkv7
from support import hlo
from support.models import random_like, shapes_of
from support.tolerance import assert_trees_close

BATCH, TOKENS, WIDTH = 2, 9, 32


def random(layers: int) -> rwkv7.Params:
    config = rwkv7.Config(layers, WIDTH, head_size=16, vocabulary=32)
    return random_like(shapes_of(rwkv7, config))


def tokens() -> jax.Array:
    return jnp.arange(BATCH * TOKENS, dtype=jnp.int32).reshape(BATCH, TOKENS)


@pytest.mark.parametrize("layers", [1, 3])
def test_single_tokens(layers: int) -> None:
    params = random(layers)
    stacked, call = rwkv7.stacked(params), jax.jit(rwkv7.apply)
    assert rwkv7.names(rwkv7.initial_state(stacked, BATCH)).keys() == (
        rwkv7.names(rwkv7.stacked(rwkv7.initial_state(params, BATCH))).keys()
    )
    state = random_like(rwkv7.initial_state(params, BATCH))
    logits, after = call(stacked, tokens()[:, 0], rwkv7.stacked(state))
    expected = call(params, tokens()[:, 0], state)
    assert_trees_close((logits, rwkv7.unstacked(after)), expected, 1e-6)


def test_inverse() -> None:
    params = random(3)
    stacked = rwkv7.stacked(params)
    assert isinstance(stacked.blocks, rwkv7.Stacked)
    assert rwkv7.stacked(stacked) is stacked or rwkv7.stacked(stacked) == stacked
    back = rwkv7.unstacked(stacked)
    assert rwkv7.names(back).keys() == rwkv7.names(params).keys()
    assert_trees_close(back, params, 0)
    assert rwkv7.names(stacked)["blocks.rest.att.key.weight"].shape == (2, WIDTH, WIDTH)


def lowered(layers: int) -> str:
    @jax.grad
    def gradient(params: rwkv7.Params) -> jax.Array:
        return rwkv7.features(params, tokens(), recompute="cheap")[0].sum()

    shapes = jax.eval_shape(lambda: rwkv7.stacked(random(layers)))
    return jax.jit(gradient).lower(shapes).as_text()


def test_program_does_not_grow_with_layers() -> None:
    few, many = (lowered(layers) for layers in (3, 12))
    assert few.count("wkv7") == many.count("wkv7")
    assert hlo.targets(few) == hlo.targets(many)
    assert few.count("\n") == many.count("\n")


def test_backward_pass_keeps_one_value_of_the_first_block() -> None:
    """Only the activations between blocks are kept once for each block."""

    def backward(params: rwkv7.Params) -> Any:
        return jax.vjp(lambda x: rwkv7.features(x, tokens(), recompute="blocks")[0], params)[1]

    shapes = jax.eval_shape(backward, jax.eval_shape(lambda: rwkv7.stacked(random(4))))
    kept = [x.shape for x in jax.tree.leaves(shapes) if x.shape[:3] == (3, BATCH, TOKENS)]
    assert kept == [(3, BATCH, TOKENS, WIDTH)]


def test_placement_is_equal(cpus: list[Any]) -> None:
    axes = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes, devices=cpus)
    params = random(3)
    apart = rwkv7.shardings(params, mesh, data="data", model="model").blocks
    stacked = rwkv7.shardings(rwkv7.stacked(params), mesh, data="data", model="model").blocks
    assert stacked.first == apart[0]
    for found, expected in zip(*map(jax.tree.leaves, (stacked.rest, apart[1])), strict=True):
        assert tuple(found.spec) == (None, *expected.spec)


@pytest.fixture
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "scripts")


@pytest.mark.usefixtures("_scripts")
def test_optimizer_and_sizes_are_equal() -> None:
    optimizer = importlib.import_module("training.optimizer")
    sizes = importlib.import_module("training.sizes")
    args = argparse.Namespace(learning_rate=1e-2, warmup=0, steps=10, weight_decay=0.5)
    params = random(3)
    gradients = jax.tree.map(jnp.cos, params)

    @jax.jit
    def updates(params: rwkv7.Params, gradients: rwkv7.Params) -> rwkv7.Params:
        transformation = optimizer.make_optimizer(args)
        return transformation.update(gradients, transformation.init(params), params)[0]

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = updates(rwkv7.stacked(params), rwkv7.stacked(gradients))
        assert_trees_close(rwkv7.unstacked(found), updates(params, gradients), 1e-6)
    for count in (sizes.size, sizes.flops_per_token):
        assert count(rwkv7.stacked(params)) == count(params)
