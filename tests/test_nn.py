"""`rwkv_jax.nn`: Flax and Equinox layers are equal, and start with the parameters of
`rwkv_jax.models`."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from rwkv_jax.models import Kernels, rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.nn import equinox, flax
from rwkv_jax.wkv7 import wkv7
from support.models import VOCABULARY, config_of, parameters, random_like, shapes_of
from support.tolerance import assert_trees_close

WIDTH, HEAD_SIZE = 32, 16
GENERATIONS = (rwkv7, rwkv6, rwkv5, rwkv4)
CONFIG = config_of(rwkv7)
BATCH, TOKENS = 2, 9

Tree = TypeVar("Tree")

FUNCTIONS = {"TimeMix": "time_mix", "ChannelMix": "channel_mix", "RWKV": "apply"}


def inputs_of(module: ModuleType, name: str) -> tuple[Any, ...]:
    """For a batch of sequences: `x` or the tokens, the state and, for a time mixing, `v_first`."""
    state = random_like(module.initial_state(parameters(module), BATCH))
    x, v_first = random_like((jnp.zeros((BATCH, TOKENS, WIDTH)),) * 2)
    return {
        "TimeMix": (x, state[1].att, *[v_first] * (module is rwkv7)),
        "ChannelMix": (x, state[1].ffn),
        "RWKV": (jnp.arange(BATCH * TOKENS).reshape(BATCH, TOKENS) % VOCABULARY, state),
    }[name]


def decoding(x: jax.Array, state: Any, *rest: jax.Array) -> tuple[Any, ...]:
    """The inputs of the first token of each sequence."""
    return x[:, 0], state, *(z[:, 0] for z in rest)


def program(call: Callable[..., Any], *operands: Any, ids: Any) -> str:
    return jax.jit(lambda *xs, ids: call(*xs, segment_ids=ids)).lower(*operands, ids=ids).as_text()


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda x: x.GENERATION.name)
def test_layers_compute_what_functions_compute(generation: ModuleType, name: str) -> None:
    """Of sequences and tokens, with a state, without one and with segments, in both frameworks."""
    where = () if name == "RWKV" else (1,)
    module = getattr(flax, name)(config_of(generation), *where, rngs=nnx.Rngs(0))
    layer = getattr(equinox, name)(config_of(generation), *where, key=jax.random.key(1))
    function = getattr(generation, FUNCTIONS[name])
    of_rows = functools.partial(function, flax.arrays(module.params))

    def of_row(*row: Any, segment_ids: Any) -> Any:
        several, ids = jax.tree.map(lambda z: z[None], (row, segment_ids))
        found = function(layer.params, *several, segment_ids=ids)
        return jax.tree.map(lambda z: z[0], found)

    x, _, *rest = inputs = inputs_of(generation, name)
    segment_ids = jnp.asarray([[1] * 4 + [2] * 5, [0] * 2 + [1] * 4 + [0] * 3], jnp.int32)
    for operands, ids in (
        (inputs, segment_ids),
        ((x, None, *rest), None),
        (decoding(*inputs), None),
    ):
        assert program(module, *operands, ids=ids) == program(of_rows, *operands, ids=ids)
        row, row_ids = jax.tree.map(lambda z: z[1], (operands, ids))
        assert program(layer, *row, ids=row_ids) == program(of_row, *row, ids=row_ids)


def scalar(results: Tree) -> tuple[jax.Array, Tree]:
    """A loss to differentiate, and the results themselves."""
    squares = (jnp.square(x).mean() for x in jax.tree.leaves(results))
    return sum(squares, jnp.float32(0)), results


@pytest.mark.slow
def test_twins_are_equal() -> None:
    """Also in the gradients of their parameters, by name."""
    params = random_like(shapes_of(rwkv7, CONFIG))
    module, layer = flax.RWKV(CONFIG, params=params), equinox.RWKV(CONFIG, params=params)
    inputs = inputs_of(rwkv7, "RWKV")

    @nnx.jit
    def of_flax(module, *inputs):
        return nnx.value_and_grad(lambda m: scalar(m(*inputs)), has_aux=True)(module)

    @eqx.filter_jit
    def of_equinox(layer, *inputs):
        def loss(layer):
            return scalar(jax.vmap(layer)(*inputs))

        return eqx.filter_value_and_grad(loss, has_aux=True)(layer)

    results, gradients = of_flax(module, *inputs)
    results_, gradients_ = of_equinox(layer, *inputs)
    assert jax.tree.structure(results) == jax.tree.structure(results_)
    assert_trees_close(results, results_)
    by_name, by_name_ = (
        {
            jax.tree_util.keystr(path, simple=True, separator="."): x
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (nnx.to_pure_dict(gradients), gradients_)
    )
    assert set(by_name) == set(by_name_)
    assert all(x.any() for x in by_name.values())
    assert_trees_close(by_name, by_name_)


def test_layers_mix_sequences_with_the_given_function() -> None:
    sequences = []

    def spy(r, *args, **options):
        sequences.append(r.shape)
        return wkv7(r, *args, **options)

    tokens = jnp.zeros((BATCH, TOKENS), jnp.int32)

    def of_flax() -> None:
        model = flax.RWKV(CONFIG, kernels=Kernels(wkv=spy), rngs=nnx.Rngs(0))
        _, state = model(tokens)
        model(tokens[:, 0], state)

    nnx.eval_shape(of_flax)
    shape = (BATCH, TOKENS, WIDTH // HEAD_SIZE, HEAD_SIZE)
    assert sequences == [shape] * CONFIG.num_layers

    jax.eval_shape(
        lambda: equinox.RWKV(CONFIG, kernels=Kernels(wkv=spy), key=jax.random.key(0))(tokens[0])
    )
    assert sequences[CONFIG.num_layers :] == [(1, *shape[1:])] * CONFIG.num_layers


def test_first_layer_gives_its_value() -> None:
    module = flax.TimeMix(CONFIG, 0, rngs=nnx.Rngs(0))
    x = jnp.ones((BATCH, TOKENS, WIDTH))
    y, _, v_first = module(x)
    assert not y.any()  # the official initialisation starts with outputs of zero
    assert v_first is not None
    assert v_first.shape == x.shape
    assert v_first.any()


def test_both_start_with_the_official_initialisation() -> None:
    """And the paths of Flax are the official names."""
    module, key = flax.RWKV(CONFIG, rngs=nnx.Rngs(0)), nnx.Rngs(0).params()
    expected = rwkv7.init(key, CONFIG)
    assert_trees_close(flax.arrays(module.params), expected)
    assert_trees_close(equinox.RWKV(CONFIG, key=key), expected)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}
    assert paths == {f"params.{name}" for name in rwkv7.names(expected)}


@pytest.mark.slow
def test_bfloat16_model_keeps_float32_parameters() -> None:
    config = rwkv7.Config(1, WIDTH, HEAD_SIZE, 256)
    model = flax.RWKV(config, dtype="bfloat16", rngs=nnx.Rngs(0))

    def gradient(model, tokens):
        return nnx.grad(lambda m: scalar(m(tokens)[0]), has_aux=True)(model)

    gradients, logits = nnx.eval_shape(gradient, model, jnp.arange(8)[None])
    assert logits.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradients))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(flax.arrays(model.params)))


@pytest.mark.parametrize("layer", [flax.RWKV, equinox.RWKV])
def test_parameters_have_to_come_from_somewhere(layer: Any) -> None:
    with pytest.raises(TypeError, match="RWKV: params and"):
        layer(CONFIG)
    with pytest.raises(TypeError, match=r"config is a dict; accepted are rwkv4\.Config, rwkv5"):
        layer({})
