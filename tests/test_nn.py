"""`rwkv_jax.nn`: Flax and Equinox layers are equal, and start with the parameters of
`rwkv_jax.models`."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rwkv_jax import evaluation, generation, models
from rwkv_jax.models import Kernels, rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.nn import equinox, flax
from rwkv_jax.wkv7 import wkv7
from support.models import config_of, parameters
from support.tolerance import assert_trees_close

CONFIG = config_of(rwkv7)
BATCH, TOKENS = 2, 9
LAYERS: Any = (("TimeMix", (1,)), ("ChannelMix", (1,)), ("RWKV", ()))
FIRST = (rwkv7, "TimeMix", (0,))
"""Only RWKV-7 has another one in the first block."""


def program(call: Callable[..., Any], *operands: Any, ids: Any) -> str:
    return jax.jit(lambda *xs, ids: call(*xs, segment_ids=ids)).lower(*operands, ids=ids).as_text()


@pytest.mark.parametrize(
    ("generation", "name", "where"),
    [*((x, *layer) for x in (rwkv7, rwkv6, rwkv5, rwkv4) for layer in LAYERS), FIRST],
    ids=lambda x: getattr(x, "__name__", str(x)).rpartition(".")[2],
)
def test_layers_compute_what_functions_compute(
    generation: ModuleType, name: str, where: tuple[int, ...]
) -> None:
    """Of sequences and tokens, with a state, without one and with segments, in both frameworks; of
    RWKV-5 and 6, which the same code calls, of tokens."""
    module = getattr(flax, name)(config_of(generation), *where, rngs=nnx.Rngs(0))
    layer = getattr(equinox, name)(config_of(generation), *where, key=jax.random.key(1))
    functions = {"TimeMix": "time_mix", "ChannelMix": "channel_mix", "RWKV": "apply"}
    function = getattr(generation, functions[name])
    of_rows = functools.partial(function, flax.arrays(module.params))

    def of_row(*row: Any, segment_ids: Any) -> Any:
        several, ids = jax.tree.map(lambda z: z[None], (row, segment_ids))
        found = function(layer.params, *several, segment_ids=ids)
        return jax.tree.map(lambda z: z[0], found)

    states = generation.initial_state(parameters(generation), BATCH)
    x = jnp.zeros((BATCH, TOKENS, CONFIG.hidden_size))
    x, state, *rest = {
        "TimeMix": (x, states[1].att, *[x] * (generation is rwkv7 and where == (1,))),
        "ChannelMix": (x, states[1].ffn),
        "RWKV": (jnp.zeros((BATCH, TOKENS), jnp.int32), states),
    }[name]
    segment_ids = jnp.asarray([[1] * 4 + [2] * 5, [0] * 2 + [1] * 4 + [0] * 3], jnp.int32)
    several = (
        ((x[:, 0], state, *(z[:, 0] for z in rest)), None),
        ((x, state, *rest), segment_ids),
        ((x, None, *rest), None),
    )
    for operands, ids in several[: 1 if generation in (rwkv5, rwkv6) else None]:
        assert program(module, *operands, ids=ids) == program(of_rows, *operands, ids=ids)
        row, row_ids = jax.tree.map(lambda z: z[1], (operands, ids))
        assert program(layer, *row, ids=row_ids) == program(of_row, *row, ids=row_ids)


def test_layers_mix_sequences_with_the_given_function() -> None:
    """But not single tokens."""
    shapes = []

    def spy(r, *args, **options):
        shapes.append(r.shape)
        return wkv7(r, *args, **options)

    def run() -> None:
        tokens = jnp.zeros((1, TOKENS), jnp.int32)
        model = flax.RWKV(CONFIG, kernels=Kernels(wkv=spy), rngs=nnx.Rngs(0))
        _, state = model(tokens)
        model(tokens[:, 0], state)
        equinox.RWKV(CONFIG, kernels=Kernels(wkv=spy), key=jax.random.key(0))(tokens[0])

    nnx.eval_shape(run)
    assert shapes == [(1, TOKENS, 2, CONFIG.head_size)] * 2 * CONFIG.num_layers


def test_both_start_with_the_official_initialisation() -> None:
    """And the paths of Flax are the official names."""
    module, key = flax.RWKV(CONFIG, rngs=nnx.Rngs(0)), nnx.Rngs(0).params()
    expected = rwkv7.init(key, CONFIG)
    assert_trees_close(flax.arrays(module.params), expected)
    assert_trees_close(equinox.RWKV(CONFIG, key=key), expected)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module))}
    assert paths == {f"params.{name}" for name in rwkv7.names(expected)}


@pytest.mark.slow
def test_bfloat16_models_keep_float32_parameters() -> None:
    """Which all have gradients, by the same names in both frameworks."""
    params, tokens = parameters(rwkv7), jnp.arange(8)
    module = flax.RWKV(CONFIG, params=params, dtype="bfloat16")
    layer = equinox.RWKV(CONFIG, params=params, dtype="bfloat16")
    of_flax = nnx.jit(nnx.grad(lambda m: jnp.square(m(tokens[None])[0]).mean()))(module)
    of_equinox = eqx.filter_jit(eqx.filter_grad(lambda m: jnp.square(m(tokens)[0]).mean()))(layer)
    found, expected = rwkv7.names(flax.arrays(of_flax.params)), rwkv7.names(of_equinox.params)
    assert found.keys() == expected.keys() == rwkv7.names(params).keys()
    assert all(x.any() and x.dtype == jnp.float32 for x in found.values())
    assert_trees_close(found, expected)


@pytest.mark.slow
def test_the_optimizer_and_the_file_of_a_flax_model(tmp_path: Path) -> None:
    """A matrix decays, and the file has what has become of it."""
    before = parameters(rwkv7)
    model = flax.RWKV(CONFIG, params=before)
    params = nnx.state(model, nnx.Param)
    transformation = optax.add_decayed_weights(-0.5, rwkv7.weight_decays(params))
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, params))
    path = tmp_path / "model.safetensors"
    models.save(path, model.params)
    halved = jax.tree.map(lambda x, y: x / 2 if y else x, before, rwkv7.weight_decays(before))
    assert_trees_close(models.load(path).params, halved, 0)
    with pytest.raises(TypeError, match="save: params is a State; accepted is a Params"):
        models.save(path, params)


@pytest.mark.parametrize("layer", [flax.RWKV, equinox.RWKV])
def test_parameters_have_to_come_from_somewhere(layer: Any) -> None:
    with pytest.raises(TypeError, match="RWKV: params and"):
        layer(CONFIG)
    with pytest.raises(TypeError, match=r"config is a dict; accepted are rwkv4\.Config, rwkv5"):
        layer({})
    params, source = parameters(rwkv7), "rngs" if layer is flax.RWKV else "key"
    key: Any = nnx.Rngs(0) if layer is flax.RWKV else jax.random.key(0)
    with pytest.raises(TypeError, match=f"RWKV: params and {source} are given; accepted is one of"):
        layer(CONFIG, params=params, **{source: key})
    with pytest.raises(TypeError, match="rwkv6: params is of rwkv7; accepted are those of rwkv6"):
        layer(config_of(rwkv6), params=params)
    with pytest.raises(ValueError, match=r"RWKV: config is .*; accepted with these params is"):
        layer(dataclasses.replace(CONFIG, vocab_size=7), params=params)
    for other in (models.quantize(models.for_decoding(params)), rwkv7.stacked(params)):
        layer(CONFIG, params=other)


@pytest.mark.usefixtures("unchecked_types")
def test_functions_take_the_parameters_of_a_flax_model() -> None:
    params, tokens = parameters(rwkv5), np.arange(5)
    found = flax.RWKV(config_of(rwkv5), params=params).params
    assert_trees_close(rwkv5.apply(found, tokens[None]), rwkv5.apply(params, tokens[None]), 0)
    for function in (
        lambda params: generation.generate(rwkv5, params, [tokens], 2).tokens,
        lambda params: evaluation.evaluate(rwkv5, params, tokens).losses.tolist(),
    ):
        assert function(found) == function(params)
