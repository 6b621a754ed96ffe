"""What devices exchange in a step of training: which parameters and gradients, in which dtype, and
how often."""

import collections
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._training import exchange
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


def matrices(model: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Of each distributed parameter of the blocks, the shape that a device computes with, and that
    of its shard."""
    params = model.shapes.params
    places = jax.tree.leaves(model.shardings(model.shapes).params.blocks)
    whole = jax.tree.leaves(rwkv7.shardings(params, model.mesh, model="model").blocks)
    shapes = [x.shape for x in jax.tree.leaves(params.blocks)]
    return [
        (whole.shard_shape(shape), place.shard_shape(shape))
        for shape, place, whole in zip(shapes, places, whole, strict=True)
        if exchange.axis_over(place) is not None
    ]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [None, "blocks"])
def test_rows_on_four_devices(train: ModuleType, tmp_path: Path, recompute: str | None) -> None:
    """Matrices are gathered once, or once again where blocks are computed again, in bfloat16, and
    each gradient is scattered. Of the embedding only rows travel."""
    more = [f"--recompute={recompute}"] if recompute else []
    step, model = lowered(train, "data=4", *more)
    found = hlo.collective_results(hlo.partitioned(step, tmp_path))
    expected: Any = collections.Counter()
    of_blocks = matrices(model)
    assert len(of_blocks) == 2 * 12 + 2
    for whole, part in of_blocks:
        expected["all-gather", "bf16", whole] += 2 if recompute else 1
        expected["reduce-scatter", "bf16", part] += 1
    head, rows = (VOCABULARY, WIDTH), (BATCH // 4, CONTEXT)
    expected["all-gather", "bf16", head] += 1
    expected["reduce-scatter", "f32", (VOCABULARY, WIDTH // 4)] += 1
    expected["all-gather", "s32", (4, *rows)] += 1
    expected["all-to-all", "bf16", (4, *rows, WIDTH // 4)] += 1
    expected["all-to-all", "bf16", (1, *rows, WIDTH)] += 1
    others = found - expected
    assert found - others == expected
    assert {kind for kind, *_ in others} == {"all-reduce"}
    # Vectors, each once, and numbers of which the norm of all gradients is made.
    vectors = [x for x in jax.tree.leaves(model.shapes) if x.ndim == 1 or x.shape[1] == 16]
    size = sum(n * math.prod(shape) for (*_, shape), n in others.items() if shape)
    assert size == sum(math.prod(x.shape) for x in vectors)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=2,model=2", "data=2,seq=2"])
def test_blocks_that_the_compiler_partitions(train: ModuleType, tmp_path: Path, mesh: str) -> None:
    """Matrices are gathered once in bfloat16, and gradients summed in bfloat16, along one axis of
    the mesh after the other. On GPUs XLA makes one collective of these sums and of the part that a
    device takes."""
    step, model = lowered(train, mesh)
    text = hlo.partitioned(step, tmp_path)
    found = hlo.collective_results(text)
    of_blocks = collections.Counter(whole for whole, _ in matrices(model))
    gathered = {shape: found["all-gather", "bf16", shape] for shape in of_blocks}
    head = (VOCABULARY // model.mesh.shape["model"], WIDTH)
    assert gathered == of_blocks
    # Only tokens of a sequence go from one device to the next.
    assert ("seq" in mesh) == any(kind == "collective-permute" for kind, *_ in found)
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
