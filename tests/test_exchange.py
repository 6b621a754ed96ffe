"""What devices exchange in a step of training: which parameters and gradients, in which dtype, and
how often."""

import collections
import functools
import importlib
import math
import os
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._training import embedding, exchange, xla_flags
from rwkv_jax.models import rwkv7
from support import hlo

pytestmark = pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices")
BATCH, CONTEXT, VOCABULARY, WIDTH = 8, 64, 512, 64


def lowered(train: ModuleType, mesh: str, *more: str) -> tuple[Any, Any]:
    """A step of training and the model that it is of."""
    steps = importlib.import_module("rwkv_jax._training.steps")
    given = {"layers": 2, "width": WIDTH, "head-size": 16, "vocabulary": VOCABULARY}
    given |= {"batch": BATCH, "context": CONTEXT, "dtype": "bfloat16", "mesh": mesh}
    args = train.options.parse([*(f"--{name}={x}" for name, x in given.items()), *more])
    model, _ = train.prepare(args)
    optimizer = train.loop.make_optimizer(args)
    shapes = steps.state_shapes(model, optimizer)
    rows = NamedSharding(model.mesh, P("data"))
    batch = train.data.Batch(*[jax.ShapeDtypeStruct((BATCH, CONTEXT), np.int32, sharding=rows)] * 2)
    step = steps.train_step(model, optimizer, shapes, 1e-4).trace(shapes, batch).lower()
    return step.gradients, model


class Parameter(NamedTuple):
    """The shapes of what a device computes with and of its shard, whether that is distributed along
    the axes of `exchange.OVER`, and whether it is along "model"."""

    whole: tuple[int, ...]
    shard: tuple[int, ...]
    is_gathered: bool
    is_split: bool


def parameters(model: Any, tree: Any) -> list[Parameter]:
    """All those of a part of the parameters, which the functions `tree` takes from them."""
    params = model.shapes.params
    places = jax.tree.leaves(tree(model.shardings(model.shapes).params))
    wholes = jax.tree.leaves(tree(rwkv7.shardings(params, model.mesh, model=model.inner)))
    return [
        Parameter(
            whole.shard_shape(x.shape),
            place.shard_shape(x.shape),
            exchange.axis_over(place) is not None,
            "model" in place.spec,
        )
        for x, place, whole in zip(jax.tree.leaves(tree(params)), places, wholes, strict=True)
    ]


def matrices(model: Any) -> list[Parameter]:
    """The distributed parameters of the blocks."""
    return [x for x in parameters(model, lambda params: params.blocks) if x.is_gathered]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        *(("data=4", None), ("data=4", "mixes"), ("data=4", "blocks")),
        *(("data=2,model=2", None), ("data=2,model=2", "cheap")),
    ],
)
def test_whole_rows(train: ModuleType, tmp_path: Path, mesh: str, recompute: str | None) -> None:
    """Matrices are gathered once, or once again with "cheap" and "blocks", in bfloat16, and each
    gradient is scattered. Of the embedding only rows travel, if they are fewer than those of a
    device. Along "model" the activations are summed twice in each block, in bfloat16, and so are
    their cotangents."""
    more = [f"--recompute={recompute}"] if recompute else []
    step, model = lowered(train, mesh, *more)
    assert (model.inner is not None) == ("model" in mesh)
    found = hlo.collective_results(hlo.partitioned(step, tmp_path))
    expected: Any = collections.Counter()
    of_blocks, sizes = matrices(model), model.mesh.shape
    assert len(of_blocks) == 2 * 12 + 2
    for x in of_blocks:
        expected["all-gather", "bf16", x.whole] += 2 if recompute in ("cheap", "blocks") else 1
        expected["reduce-scatter", "bf16", x.shard] += 1
    head, rows = (VOCABULARY // sizes["model"], WIDTH), (BATCH // sizes["data"], CONTEXT)
    by_rows = model.inner is None
    shard = (head[0] // 4, WIDTH) if by_rows else (head[0], WIDTH // sizes["data"])
    expected["all-gather", "bf16", head] += 1
    expected["reduce-scatter", "f32", shard] += 1
    if model.inner is None:
        expected["all-gather", "s32", (4, *rows)] += 1
        expected["all-to-all", "bf16", (4, *rows, WIDTH // 4)] += 1
        expected["all-to-all", "bf16", (1, *rows, WIDTH)] += 1
    else:
        expected["all-gather", "f32", head] += 1
        expected["reduce-scatter", "f32", shard] += 1
        layers = len(model.shapes.params.blocks)
        # Those of the embedding as well.
        expected["all-reduce", "bf16", (*rows, WIDTH)] = 4 * layers + 2
        for x in of_blocks:
            expected["all-reduce", "bf16", x.shard] += not x.is_split
        # The loss of each token.
        tokens = (math.prod(rows),)
        expected |= {("all-reduce", "f32", tokens): 3, ("all-reduce", "s32", tokens): 2}
    others = found - expected
    assert found - others == expected
    assert {kind for kind, *_ in others} == {"all-reduce"}
    # Vectors, each once, and numbers of which the norm of all gradients is made.
    vectors = [x.shard for x in parameters(model, lambda params: params) if not x.is_gathered]
    size = sum(n * math.prod(shape) for (*_, shape), n in others.items() if shape)
    assert size == sum(math.prod(shape) for shape in vectors)


@pytest.mark.parametrize(
    ("options", "is_joined"),
    [
        (["--batch=12"], True),
        (["--batch=16", "--accumulate=2", "--context=128", "--mesh=model=4"], True),
        # Rows that do not divide evenly, few tokens, or pieces.
        (["--batch=14"], False),
        (["--batch=16", "--accumulate=4"], False),
        (["--batch=4"], False),
        (["--batch=12", "--piece=8"], False),
    ],
)
def test_model_is_a_part_of_data(train: ModuleType, options: list[str], is_joined: bool) -> None:
    """Where devices exchange less if each has rows of its own than if they sum activations."""
    given = ["--layers=1", f"--width={WIDTH}", "--head-size=16", f"--context={CONTEXT}"]
    args = train.options.parse([*given, "--mesh=data=2,model=2", "--dry-run", *options])
    mesh = train.prepare(args)[0].mesh
    asked = {"data": 1} | args.mesh
    if is_joined:
        asked = {"data": asked["data"] * asked["model"], "model": 1}
    assert {axis: mesh.shape[axis] for axis in ("data", "model")} == asked
    assert ("less" in train.devices.describe(mesh, args.mesh)) == is_joined


@pytest.mark.parametrize(("mesh", "has_seq"), [({"data": 4}, False), ({"data": 2, "seq": 2}, True)])
def test_flags(monkeypatch: pytest.MonkeyPatch, mesh: dict[str, int], has_seq: bool) -> None:
    """Passes of XLA that meshes without "seq" switch off. Variables that are set already count
    more."""
    variables = {"XLA_FLAGS": "--xla_disable_hlo_passes=of-the-user"}
    monkeypatch.setattr(os, "environ", variables)
    xla_flags.add_for_several_devices(mesh)
    *flags, last = variables["XLA_FLAGS"].split()
    assert has_seq == ("--xla_disable_hlo_passes=reshape-mover,all-reduce-contiguous" not in flags)
    assert last == "--xla_disable_hlo_passes=of-the-user"
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"
    xla_flags.add_for_several_devices(mesh)
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [512, 257])
def test_loss_of_heads_on_several_devices(train: ModuleType, vocabulary: int) -> None:
    """It and its gradients are those of one device, also with documents and masks, and where the
    vocabulary does not divide evenly."""
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, vocabulary, (2, 4, 12), np.int32)
    ids = np.sort(rng.integers(0, 4, (4, 12), np.int32))[:, ::-1]
    batch = train.data.Batch(tokens, targets, segment_ids=ids, mask=rng.random((4, 12)) < 0.7)
    sizes = ["--layers=2", "--width=32", "--head-size=16", f"--vocabulary={vocabulary}"]
    steps, found = importlib.import_module("rwkv_jax._training.steps"), []
    for mesh in ("data=1", "data=2,model=2"):
        args = train.options.parse([*sizes, "--batch=4", "--context=12", f"--mesh={mesh}"])
        model, _ = train.prepare(args)
        optimizer = train.loop.make_optimizer(args)
        shapes = steps.state_shapes(model, optimizer)
        params = steps.initial_state(model, optimizer, shapes, seed=0).params
        # Many initial parameters are zero.
        noise = np.random.default_rng(1)
        arrays = [noise.normal(0, 0.1, x.shape).astype(np.float32) for x in jax.tree.leaves(params)]
        places = [x.sharding for x in jax.tree.leaves(params)]
        noisy = map(jnp.add, jax.tree.leaves(params), map(train.devices.place, arrays, places))
        params = jax.tree.unflatten(jax.tree.structure(params), noisy)
        loss = functools.partial(steps.mean_loss, model)
        placed = steps.on_mesh(batch, model.mesh)
        found.append(jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(params, placed)))
    for x, y in zip(*found, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * np.abs(x).max())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["seq=2,model=2", "data=2,seq=2"])
def test_blocks_that_the_compiler_partitions(train: ModuleType, tmp_path: Path, mesh: str) -> None:
    """Matrices are gathered once in bfloat16, and gradients summed in bfloat16, along one axis of
    the mesh after the other. On GPUs XLA makes one collective of these sums and of the part that a
    device takes."""
    step, model = lowered(train, mesh)
    text = hlo.partitioned(step, tmp_path)
    found = hlo.collective_results(text)
    of_blocks = collections.Counter(x.whole for x in matrices(model))
    gathered = {shape: found["all-gather", "bf16", shape] for shape in of_blocks}
    head = (VOCABULARY // model.mesh.shape["model"], WIDTH)
    assert gathered == of_blocks
    # Only tokens of a sequence go from one device to the next.
    assert any(kind == "collective-permute" for kind, *_ in found)
    assert found["all-gather", "bf16", head] == 1

    def size(kind: str, dtype: str, axes: int) -> int:
        return sum(
            n * math.prod(shape)
            for (of, which, shape), n in found.items()
            if (of, which, len(shape)) == (kind, dtype, axes)
        )

    most = sum(n * math.prod(shape) for shape, n in of_blocks.items())
    axes = sum(model.mesh.shape[axis] > 1 for axis in exchange.OVER)
    assert size("all-reduce", "bf16", 2) <= 1.01 * most * axes
    # Mixes and other vectors, which are stacked to matrices.
    assert size("all-reduce", "f32", 2) < most / 10
    assert max(math.prod(shape) for *_, shape in found) < BATCH * CONTEXT * VOCABULARY // 4


@pytest.mark.parametrize("tokens", [2, 16])
def test_embedding(tokens: int) -> None:
    """From parts of the table: fewer tokens than rows of the table travel, otherwise the table."""
    kinds = (AxisType.Auto,) * 3
    mesh = jax.make_mesh((2, 2, 1), ("data", "model", "seq"), axis_types=kinds)
    place = NamedSharding(mesh, P("model", exchange.OVER))
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((24, 8)), jnp.float32)
    at = jnp.asarray(rng.integers(0, 24, (4, tokens)))
    weights = jnp.asarray(rng.standard_normal((4, tokens, 8)), jnp.float32)

    def local(table: jax.Array, at: jax.Array) -> jax.Array:
        return exchange.embedding(table, at, place, jnp.float32)

    rows = P(*exchange.OVER)
    embed = jax.shard_map(local, mesh=mesh, in_specs=(place.spec, rows), out_specs=rows)

    @jax.jit
    def both(table: jax.Array, embed: Any = embed) -> Any:
        x = embed(table, at)
        return x, jax.grad(lambda table: jnp.sum(embed(table, at) * weights))(table)

    x, gradient = both(jax.device_put(table, place))
    np.testing.assert_array_equal(x, table[at])
    expected = jax.grad(lambda table: jnp.sum(table[at] * weights))(table)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [5000, 0, 1, 65])
def test_gradient_of_look_up(count: int) -> None:
    """Of tokens with rows in a part of a block, in several blocks and in blocks of blocks, and of
    tokens that are not in the table."""
    rng = np.random.default_rng(0)
    tokens = rng.choice([-1, 0, 1, 2, 5, 8, 9], count, p=[0.05, 0.9, 0.01, 0.01, 0.01, 0.01, 0.01])
    table, weights = rng.standard_normal((9, 3)), rng.standard_normal((count, 3))

    def total(table: jax.Array) -> jax.Array:
        rows = embedding.look_up(table, jnp.asarray(tokens, jnp.int32), jnp.float32)
        return jnp.sum(rows * weights.astype(np.float32))

    expected, there = np.zeros((9, 3)), (tokens >= 0) & (tokens < 9)
    np.add.at(expected, tokens[there], weights[there])
    found = jax.jit(jax.grad(total))(jnp.asarray(table, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
