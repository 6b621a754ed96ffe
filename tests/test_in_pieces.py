"""`losses.in_pieces` against whole rows, and truncated against a loop over pieces."""

import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax import finetuning
from rwkv_jax.losses import cross_entropy, in_pieces
from rwkv_jax.models import Kernels, rwkv4, rwkv6, rwkv7
from rwkv_jax.sharding import shard
from rwkv_jax.wkv7 import wkv7
from support import meshes
from support.models import VOCABULARY, config_of, parameters, random_like, shapes_of
from support.operators import FAST
from support.tolerance import assert_trees_close

PIECE = 8
SEGMENT_IDS = np.array(
    [
        [1] * 24,
        [0, 0] + [1] * 7 + [2] * 6 + [0] * 3 + [3] * 6,
        [4] * 8 + [5] * 6 + [0] * 2 + [5] * 8,
        [6] * 3 + [0] * 13 + [6] * 8,
    ],
    np.int32,
)
"""Documents that go on after a piece, that begin and end within one and with one, and padding
before, between and within them, and throughout a piece."""
ROWS, TOKENS = SEGMENT_IDS.shape
BEGIN_WITH_A_PIECE = np.array([[0, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1]], bool)
"""In which rows of each piece the first token that is no padding begins a document."""


@pytest.fixture(scope="module")
def rows() -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, what is to be predicted after each, and how much each prediction counts."""
    rng = np.random.default_rng(0)
    weights = (SEGMENT_IDS != 0) * np.maximum(rng.random((ROWS, TOKENS)) - 0.2, 0)
    tokens, targets = rng.integers(0, VOCABULARY, (2, ROWS, TOKENS))
    return jnp.asarray(tokens), jnp.asarray(targets), jnp.asarray(weights, jnp.float32)


def kernels_of(module: ModuleType) -> Kernels:
    return Kernels(FAST[f"wkv{module.GENERATION.name[-1]}"].implementation)


def small(module: ModuleType) -> Any:
    """Random parameters; only the second block of RWKV-7 differs by more than a norm."""
    config = config_of(module, num_layers=2 if module is rwkv7 else 1)
    return random_like(shapes_of(module, config))


def some_state(module: ModuleType, params: Any) -> Any:
    """A state of positive numbers, as RWKV-4 has denominators."""
    rng = np.random.default_rng(3)
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 + 0.3 * rng.random(x.shape), x.dtype),
        module.initial_state(params, ROWS),
    )


def square(state: Any) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.vdot(x, x) for x in jax.tree.leaves(state)]))


@pytest.mark.parametrize("module", [rwkv7, rwkv6, rwkv4], ids=lambda m: m.GENERATION.name)
def test_exact(module: ModuleType, rows: Any) -> None:
    """The loss and the last state, and their gradients of parameters and of the first state."""
    tokens, targets, mask = rows
    kernels, ids = kernels_of(module), jnp.asarray(SEGMENT_IDS)
    params = small(module)

    def whole(params: Any, state: Any) -> tuple[jax.Array, Any]:
        x, state = module.hidden_states(params, tokens, state, segment_ids=ids, kernels=kernels)
        return cross_entropy(x, params.head.weight, targets, mask=mask, l2_wrap=0.1), state

    def pieces(params: Any, state: Any) -> tuple[jax.Array, Any]:
        options = {"segment_ids": ids, "mask": mask, "l2_wrap": 0.1, "kernels": kernels}
        return in_pieces(params, tokens, targets, state, piece=PIECE, **options)

    def gradients(loss: Any) -> Any:
        @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
        def of_both(params: Any, state: Any) -> tuple[jax.Array, Any]:
            value, state = loss(params, state)
            return value + 0.01 * square(state), (value, state)

        return jax.jit(of_both)(params, some_state(module, params))

    assert_trees_close(gradients(pieces), gradients(whole))


@pytest.mark.parametrize("module", [rwkv7, rwkv6, rwkv4], ids=lambda m: m.GENERATION.name)
def test_truncated(module: ModuleType, rows: Any) -> None:
    tokens, targets, mask = rows
    kernels, ids = kernels_of(module), jnp.asarray(SEGMENT_IDS)
    params = small(module)
    first = state = some_state(module, params)

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def pieces(params: Any, state: Any) -> tuple[jax.Array, Any]:
        options = {"segment_ids": ids, "mask": mask, "kernels": kernels, "truncate": True}
        return in_pieces(params, tokens, targets, state, piece=PIECE, **options)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def one(params: Any, state: Any, *piece: jax.Array) -> tuple[jax.Array, Any]:
        inputs, targets, mask, ids = piece
        x, state = module.hidden_states(params, inputs, state, segment_ids=ids, kernels=kernels)
        return cross_entropy(x, params.head.weight, targets, mask=mask, reduction="sum"), state

    total, sums, of_first = 0.0, jax.tree.map(jnp.zeros_like, params), None
    fresh = module.initial_state(params, ROWS)
    for i, begin in enumerate(BEGIN_WITH_A_PIECE):
        place = slice(i * PIECE, (i + 1) * PIECE)
        cut = (x[:, place] for x in (tokens, targets, mask, ids))
        state = jax.tree.map(
            lambda x, y, begin=begin: jnp.where(begin.reshape(-1, *[1] * (x.ndim - 1)), x, y),
            *(fresh, state),
        )
        (loss, state), (dparams, dstate) = one(params, state, *cut)
        total, sums = total + loss, jax.tree.map(jnp.add, sums, dparams)
        of_first = dstate if of_first is None else of_first
    mean = jax.tree.map(lambda x: x / float(jnp.sum(mask)), (total, (sums, of_first)))
    (value, last), gradients = jax.jit(pieces)(params, first)
    assert_trees_close((value, gradients), mean)
    assert_trees_close(last, state)


@pytest.mark.parametrize("truncate", [False, True])
def test_gradients_are_summed_in_float32(truncate: bool) -> None:
    """A sum in bfloat16 would end at 256 times the gradient of a piece."""
    count = 300
    config = config_of(rwkv7, num_layers=1, hidden_size=16)
    params = jax.tree.map(lambda x: x.astype("bfloat16"), random_like(shapes_of(rwkv7, config)))
    tokens = jnp.tile(jnp.arange(3, dtype=jnp.int32), count)
    tokens = jnp.stack([tokens, jnp.roll(tokens, -1)])[:, None]
    segment_ids = jnp.repeat(jnp.arange(1, count + 1, dtype=jnp.int32), 3)[None]

    def loss(params: Any, tokens: jax.Array, segment_ids: jax.Array) -> jax.Array:
        options = {"reduction": "sum", "kernels": kernels_of(rwkv7), "truncate": truncate}
        return in_pieces(params, *tokens, piece=3, segment_ids=segment_ids, **options)[0]

    gradients = jax.jit(jax.grad(loss))
    one = gradients(params, tokens[..., :3], segment_ids[:, :3])
    found = gradients(params, tokens, segment_ids)
    expected = jax.tree.map(lambda x: count * x.astype("float32"), one)
    assert {x.dtype.name for x in jax.tree.leaves(found)} == {"bfloat16"}
    wide = jax.tree.map(lambda x: x.astype("float32"), found)
    assert_trees_close(wide, expected, 1e-2)


@pytest.mark.parametrize("truncate", [False, True])
def test_memory_and_program_do_not_grow(truncate: bool) -> None:
    """Beyond the tokens and, for exact gradients, one state for each piece."""
    shapes = shapes_of(rwkv7, config_of(rwkv7, num_layers=1, hidden_size=64))
    state = jax.eval_shape(functools.partial(rwkv7.initial_state, batch=1), shapes)
    of_state = sum(4 * math.prod(x.shape) for x in jax.tree.leaves(state))

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return in_pieces(params, tokens, tokens, piece=64, truncate=truncate, kernels="xla")[0]

    sizes = {}
    for count in (4, 20):
        tokens = jax.ShapeDtypeStruct((1, count * 64), np.int32)
        lowered = jax.jit(jax.value_and_grad(loss)).lower(shapes, tokens)
        memory = lowered.compile().memory_analysis()
        assert memory is not None
        sizes[count] = memory.temp_size_in_bytes, len(lowered.as_text().splitlines())
    grown, lines = np.subtract(sizes[20], sizes[4])
    of_tokens = 16 * 64 * 4
    assert grown <= 16 * (0 if truncate else of_state) + 4 * of_tokens
    assert lines == 0


@pytest.mark.slow
def test_what_is_frozen_has_no_gradient(rows: Any) -> None:
    """And an adapter beside it has those of whole rows."""
    tokens, targets, _ = rows
    params = random_like(shapes_of(rwkv7, config_of(rwkv7, num_layers=1)))
    adapter = finetuning.init_adapter(jax.random.key(0), params, rank=2)
    adapter = random_like(adapter)

    def loss(adapter: Any, truncate: bool, piece: int) -> jax.Array:
        own = finetuning.adapted(params, adapter)
        return in_pieces(own, tokens, targets, piece=piece, truncate=truncate, kernels="xla")[0]

    gradients = jax.jit(jax.grad(loss), static_argnums=(1, 2))
    whole = gradients(adapter, False, TOKENS)
    assert_trees_close(gradients(adapter, False, PIECE), whole, 1e-4)
    assert_trees_close(gradients(adapter, True, TOKENS), whole, 1e-4)


@functools.partial(jax.jit, static_argnums=(2, 3))
@jax.value_and_grad
def of_loss(params: Any, rows: Any, kernels: Kernels, truncate: bool) -> jax.Array:
    tokens, targets, mask = rows
    options = {"kernels": kernels, "truncate": truncate, "mask": mask}
    return in_pieces(params, tokens, targets, piece=PIECE, segment_ids=SEGMENT_IDS, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "axis_type", "truncate"),
    [
        ("data=2,model=2", AxisType.Explicit, True),
        ("data=2,seq=2", AxisType.Explicit, False),
        ("data=2,seq=2", AxisType.Auto, True),
    ],
)
def test_on_a_mesh(
    axes: str, axis_type: AxisType, truncate: bool, rows: Any, cpus: list[Any]
) -> None:
    params = random_like(shapes_of(rwkv7, config_of(rwkv7, num_layers=1)))
    mesh = meshes.mesh(axes, axis_type, cpus)
    wkv = shard(wkv7, mesh, **meshes.PLACES[axes])
    expected = of_loss(params, rows, Kernels("xla", "xla"), truncate)
    axes_of = {"model": "model"} if "model" in axes else {}
    placed = jax.device_put(params, rwkv7.shardings(params, mesh, **axes_of))
    on_mesh = jax.device_put(rows, NamedSharding(mesh, P("data")))
    found = of_loss(placed, on_mesh, Kernels("xla", "xla", wkv=wkv), truncate)
    assert_trees_close(found, expected, 1e-4)


TOKENS_OF_ERRORS = np.zeros((2, 8), np.int32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"piece": 3}, r"tokens has shape \(2, 8\) where piece is 3; accepted is \[B, T\]"),
        ({"piece": 0}, "piece is 0; accepted is an integer from 1 on"),
        ({"piece": 4.0}, "piece is 4.0; accepted is an integer from 1 on"),
        ({"tokens": TOKENS_OF_ERRORS[0]}, r"tokens has shape \(8,\); accepted is \[B, T\]"),
        ({"tokens": np.ones((2, 8), np.float32)}, "tokens is float32; accepted are integers"),
        ({"mask": np.ones((2, 9), bool)}, r"mask has shape \(2, 9\); accepted is \[B, T\]"),
        (
            {"segment_ids": np.ones((2, 9), np.int32)},
            r"segment_ids has shape \(2, 9\); accepted is",
        ),
        ({"targets": np.ones((2, 9), np.int32)}, r"targets is int32 of shape \(2, 9\); accepted"),
        ({"targets": np.ones((2, 8), np.float32)}, "targets is float32 of shape"),
        ({"reduction": "none"}, "reduction is 'none'; accepted are 'mean', 'sum'"),
        ({"params": 1}, "params is a int; accepted is a Params"),
    ],
)
@pytest.mark.quick
def test_bad_input(changed: dict[str, Any], message: str, unchecked_types: None) -> None:
    tokens = {"tokens": TOKENS_OF_ERRORS, "targets": TOKENS_OF_ERRORS}
    given: dict[str, Any] = {"params": parameters(rwkv7), **tokens, "piece": 4, **changed}
    with pytest.raises((TypeError, ValueError), match=f"in_pieces: {message}"):
        in_pieces(**given)
