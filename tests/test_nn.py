"""`rwkv_jax.nn`: Flax and Equinox layers are equal, and start with the parameters of
`rwkv_jax.models`."""

from typing import Any, TypeAlias, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import PyTree

from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.nn import equinox, flax
from rwkv_jax.wkv7 import wkv7
from support.tolerance import assert_trees_close

WIDTH, HEAD_SIZE = 32, 16
CONFIG = rwkv7.Config(num_layers=2, hidden_size=WIDTH, head_size=HEAD_SIZE, vocab_size=256)
BATCH, TOKENS = 2, 9

Tree = TypeVar("Tree")

rng = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape, np.float32))


STATE = rwkv7.TimeMixState(
    normal(BATCH, WIDTH), normal(BATCH, WIDTH // HEAD_SIZE, HEAD_SIZE, HEAD_SIZE)
)


FlaxLayer: TypeAlias = flax.TimeMix | flax.ChannelMix | flax.RWKV
EquinoxLayer: TypeAlias = equinox.TimeMix | equinox.ChannelMix | equinox.RWKV
Inputs: TypeAlias = tuple[PyTree[jax.Array], ...]


def twins(name: str) -> tuple[FlaxLayer, EquinoxLayer, Inputs]:
    """A layer in both frameworks, and its inputs for a batch of sequences: `x` or the tokens, the
    state and, for a time mixing, `v_first`."""
    rngs, key = nnx.Rngs(0), jax.random.key(1)
    x = normal(BATCH, TOKENS, WIDTH)
    if name == "TimeMix":
        return (
            flax.TimeMix(CONFIG, 1, rngs=rngs),
            equinox.TimeMix(CONFIG, 1, key=key),
            (x, STATE, normal(BATCH, TOKENS, WIDTH)),
        )
    if name == "ChannelMix":
        return (
            flax.ChannelMix(CONFIG, 1, rngs=rngs),
            equinox.ChannelMix(CONFIG, 1, key=key),
            (x, STATE.shift),
        )
    tokens = jnp.asarray(rng.integers(0, 256, (BATCH, TOKENS)), jnp.int32)
    state = tuple(rwkv7.BlockState(STATE, STATE.shift) for _ in range(CONFIG.num_layers))
    return (
        flax.RWKV(CONFIG, rngs=rngs),
        equinox.RWKV(CONFIG, key=key),
        (tokens, state),
    )


def alike(module: FlaxLayer, layer: EquinoxLayer) -> tuple[Any, Any]:
    """Both layers with the same parameters: the initial ones with noise, because many are zero."""
    params = jax.tree.map(lambda x: x + 0.1 * normal(*x.shape), layer.params)
    module.params = flax.parameters(params)
    return module, eqx.tree_at(lambda x: x.params, layer, params)


def decoding(inputs: Inputs) -> Inputs:
    """The inputs of the first token of each sequence."""
    state = inputs[1]
    x, *rest = (z[:, 0] for z in (inputs[0], *inputs[2:]))
    return (x, state, *rest)


def scalar(results: Tree) -> tuple[jax.Array, Tree]:
    """A loss to differentiate, and the results themselves."""
    squares = (jnp.square(x).mean() for x in jax.tree.leaves(results))
    return sum(squares, jnp.float32(0)), results


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, mode) for name in ("TimeMix", "ChannelMix") for mode in ("sequence", "decode")),
        ("RWKV", "sequence"),
    ],
)
def test_twins_are_equal(name: str, mode: str) -> None:
    module, layer, inputs = twins(name)
    module, layer = alike(module, layer)
    if mode == "decode":
        inputs = decoding(inputs)

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
        {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in leaves}
        for leaves in (
            jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(gradients)),
            jax.tree_util.tree_leaves_with_path(gradients_),
        )
    )
    assert set(by_name) == set(by_name_)
    assert all(x.any() for x in by_name.values())
    assert_trees_close(by_name, by_name_)


@pytest.mark.parametrize("name", ["TimeMix", "ChannelMix", "RWKV"])
@pytest.mark.parametrize("mode", ["sequence", "decode"])
def test_state_is_optional(name: str, mode: str) -> None:
    module, layer, inputs = twins(name)
    module, layer = alike(module, layer)
    if mode == "decode":
        inputs = decoding(inputs)
    x, state, *rest = inputs
    of_flax, of_equinox = nnx.jit(lambda *args: module(*args)), eqx.filter_jit(layer)
    results = of_flax(x, None, *rest)
    assert_trees_close(results, of_flax(x, jax.tree.map(jnp.zeros_like, state), *rest))
    first = jax.tree.map(lambda z: z[0], (x, None, *rest))
    assert_trees_close(of_equinox(*first), jax.tree.map(lambda z: z[0], results))


@pytest.mark.parametrize("name", ["TimeMix", "ChannelMix", "RWKV"])
def test_decoding_replaces_a_donated_state(name: str) -> None:
    """Several steps in both frameworks. A model starts from `initial_state`, and a layer from the
    state that a call without a state returns."""
    module, layer, inputs = twins(name)
    module, layer = alike(module, layer)
    x, _, *rest = decoding(inputs)
    if name == "RWKV":
        states = [rwkv7.initial_state(layer.params, BATCH) for _ in range(2)]
    else:
        states = [module(x, None, *rest)[1], jax.vmap(layer)(x, None, *rest)[1]]
    of_flax = nnx.jit(lambda m, state: m(x, state, *rest), donate_argnums=1)
    of_equinox = eqx.filter_jit(
        lambda m, state: jax.vmap(m)(x, state, *rest), donate="all-except-first"
    )
    for _ in range(3):
        firsts = tuple(states)
        results, results_ = of_flax(module, firsts[0]), of_equinox(layer, firsts[1])
        assert all(z.is_deleted() for z in jax.tree.leaves(firsts))
        assert_trees_close(results, results_)
        states = [results[1], results_[1]]
    assert not x.is_deleted()


@pytest.mark.parametrize("name", ["TimeMix", "ChannelMix", "RWKV"])
def test_segment_ids_reach_the_functions(name: str) -> None:
    module, layer, inputs = twins(name)
    module, layer = alike(module, layer)
    ids = jnp.asarray([[1] * 4 + [2] * 5, [0] * 2 + [1] * 4 + [0] * 3], jnp.int32)
    function = {"TimeMix": rwkv7.time_mix, "ChannelMix": rwkv7.channel_mix, "RWKV": rwkv7.apply}
    expected = jax.jit(function[name])(flax.arrays(module.params), *inputs, segment_ids=ids)
    of_flax = nnx.jit(lambda *xs, ids: module(*xs, segment_ids=ids))(*inputs, ids=ids)
    one = eqx.filter_jit(lambda *xs, ids: layer(*xs, segment_ids=ids))
    of_equinox = one(*jax.tree.map(lambda x: x[1], inputs), ids=ids[1])
    assert_trees_close(of_flax, expected)
    assert_trees_close(of_equinox, jax.tree.map(lambda x: x[1], expected))


def test_layers_mix_sequences_with_the_given_function() -> None:
    sequences = []

    def spy(r, *args, **options):
        sequences.append(r.shape)
        return wkv7(r, *args, **options)

    tokens = jnp.zeros((BATCH, TOKENS), jnp.int32)

    def of_flax() -> None:
        model = flax.RWKV(CONFIG, wkv=spy, rngs=nnx.Rngs(0))
        _, state = model(tokens)
        model(tokens[:, 0], state)

    nnx.eval_shape(of_flax)
    shape = (BATCH, TOKENS, WIDTH // HEAD_SIZE, HEAD_SIZE)
    assert sequences == [shape] * CONFIG.num_layers

    jax.eval_shape(lambda: equinox.RWKV(CONFIG, wkv=spy, key=jax.random.key(0))(tokens[0]))
    assert sequences[CONFIG.num_layers :] == [(1, *shape[1:])] * CONFIG.num_layers


def test_first_layer_gives_its_value() -> None:
    module = flax.TimeMix(CONFIG, 0, rngs=nnx.Rngs(0))
    x = normal(BATCH, TOKENS, WIDTH)
    y, _, v_first = module(x)
    assert not y.any()  # the official initialisation starts with outputs of zero
    assert v_first is not None
    assert v_first.shape == x.shape
    assert v_first.any()


def test_both_start_with_the_official_initialisation() -> None:
    module, layer, _ = twins("RWKV")
    key = nnx.Rngs(0).params()
    expected = rwkv7.init(key, CONFIG)
    assert_trees_close(flax.arrays(module.params), expected)
    assert_trees_close(equinox.RWKV(CONFIG, key=key), expected)
    assert set(rwkv7.names(layer.params)) == set(rwkv7.names(expected))


def test_flax_paths_are_official_names() -> None:
    module, _, _ = twins("RWKV")
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}
    names = rwkv7.names(flax.arrays(module.params))
    assert paths == {f"params.{name}" for name in names}


def test_bfloat16_model_keeps_float32_parameters() -> None:
    config = rwkv7.Config(1, WIDTH, HEAD_SIZE, 256)
    model = flax.RWKV(config, dtype="bfloat16", rngs=nnx.Rngs(0))

    @nnx.jit
    def gradient(model, tokens):
        return nnx.grad(lambda m: scalar(m(tokens)[0]), has_aux=True)(model)

    gradients, logits = gradient(model, jnp.arange(8)[None])
    assert logits.dtype == jnp.float32
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradients))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(flax.arrays(model.params)))


SMALLER = {"num_layers": 1, "hidden_size": 16, "vocab_size": 11}


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (rwkv4, rwkv4.Config(**SMALLER)),
        (rwkv5, rwkv5.Config(**SMALLER, head_size=16)),
        (rwkv6, rwkv6.Config(**SMALLER, head_size=16, mix_rank=3, decay_rank=5)),
    ],
    ids=["rwkv4", "rwkv5", "rwkv6"],
)
def test_models_of_every_generation(module: Any, config: Any) -> None:
    """With parameters that are given, such as those of a checkpoint."""
    shapes = jax.eval_shape(lambda key: module.init(key, config), jax.random.key(0))
    params = jax.tree.map(lambda x: normal(*x.shape), shapes)
    tokens = jnp.asarray(rng.integers(0, 11, (BATCH, 5)), jnp.int32)
    options: Any = {"implementation": "reference"}

    def apply(tokens: jax.Array) -> Any:
        return module.apply(params, tokens, **options)

    model = flax.RWKV(config, params=params, **options)
    assert str(jax.make_jaxpr(model)(tokens)) == str(jax.make_jaxpr(apply)(tokens))
    model = equinox.RWKV(config, params=params, **options)
    of_equinox = eqx.filter_jit(lambda model, tokens: jax.vmap(model)(tokens))
    assert_trees_close(of_equinox(model, tokens), jax.jit(apply)(tokens))

    def parameters_of(layer: Any) -> Any:
        made = nnx.eval_shape(lambda: layer(config, 0, rngs=nnx.Rngs(0)))
        return nnx.to_pure_dict(nnx.state(made))["params"].keys()

    assert parameters_of(flax.TimeMix) <= set(module.TimeMixParams._fields)
    assert parameters_of(flax.ChannelMix) == set(module.ChannelMixParams._fields)


@pytest.mark.parametrize("layer", [flax.RWKV, equinox.RWKV])
def test_parameters_have_to_come_from_somewhere(layer: Any) -> None:
    with pytest.raises(TypeError, match="RWKV: params and"):
        layer(CONFIG)
    with pytest.raises(TypeError, match=r"config is a dict; accepted are rwkv4\.Config, rwkv5"):
        layer({})
