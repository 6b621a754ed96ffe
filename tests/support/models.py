"""Small models with random parameters."""

import dataclasses
import functools
import math
from collections.abc import Iterable
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from rwkv_jax.models import rwkv7
from support import language_models
from support.tolerance import EXACT_FLOAT32, rms_error

VOCABULARY = 61
_SIZES = {"num_layers": 2, "hidden_size": 32, "head_size": 16, "vocab_size": VOCABULARY}
DOCUMENTS = np.array([[0] * 2 + [1] * 6 + [0] * 3 + [1] * 5 + [0] * 3, [2] * 6 + [3] * 7 + [2] * 6])
"""Segment ids with padding before, between and after documents, and with adjacent documents."""


@cast(Any, functools.cache)
def shapes_of(module: ModuleType, config: Any) -> Any:
    """The parameters of a generation as shapes."""
    return jax.eval_shape(lambda: module.init(jax.random.key(0), config))


def random_like(shapes: Any, scale: float = 0.3, seed: int = 1) -> Any:
    """A tree of random numbers in float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.standard_normal(x.shape), jnp.float32), shapes
    )


def config_of(module: ModuleType, **sizes: int) -> Any:
    """A `Config` with small sizes, but for those that are given; a head size and ranks where the
    generation has them."""
    accepted = {field.name for field in dataclasses.fields(module.Config)}
    return module.Config(**{n: x for n, x in (_SIZES | sizes).items() if n in accepted})


def parameters(module: ModuleType) -> Any:
    """Random parameters of a generation, with sizes at which all of them count."""
    return random_like(shapes_of(module, config_of(module)))


def formulas(module: ModuleType, params: Any, rows: Iterable[Any]) -> list[np.ndarray]:
    """The logits after each token of some rows, by the published formulas in float64."""
    named = module.names(params)
    return [language_models.logits(module.GENERATION.name, named, tokens) for tokens in rows]


def predicted(module: ModuleType, params: Any, tokens: Any) -> tuple[np.ndarray, np.ndarray]:
    """The log probability of each token but the first one, given those before it, and whether it
    was the most probable one: by the published formulas in float64."""
    tokens = np.asarray(tokens)
    (logits,) = formulas(module, params, [tokens[:-1]])
    chosen = np.take_along_axis(logits, tokens[1:, None], axis=1)[:, 0]
    return chosen - np.log(np.exp(logits).sum(1)), logits.argmax(1) == tokens[1:]


def assert_same_model(module: ModuleType, params: Any, others: Any) -> None:
    """Two trees of parameters give the same logits for a sequence and for a token after it."""
    tokens = jnp.asarray([[1, 2, 3], [4, 5, 6]])

    @jax.jit
    def run(params: Any) -> tuple[jax.Array, jax.Array]:
        sequence, state = module.apply(params, tokens)
        return sequence, module.apply(params, tokens[:, 0], state)[0]

    for found, expected in zip(run(params), run(others), strict=True):
        assert rms_error(found, expected) < EXACT_FLOAT32


_RANKS = {"w": 40, "a": 8, "v": 16, "g": 72}


def with_heads_of_64(width: int, dtype: str, layers: int = 2) -> rwkv7.Params:
    """Random parameters of RWKV-7 with heads of 64 channels, where activations stay near 1. The
    ranks of low-rank maps differ."""
    shapes = shapes_of(rwkv7, rwkv7.Config(layers, width, vocab_size=11))
    rng = np.random.default_rng(width)

    def random(path: KeyPath, x: jax.ShapeDtypeStruct) -> jax.Array:
        name, shape = jax.tree_util.keystr(path[-1:], simple=True), list(x.shape)
        if len(name) == 2 and name[1] in "12":
            shape[name[1] == "1"] = _RANKS[name[0]]
        size = math.sqrt(shape[-1]) if len(shape) > 1 else 1.5
        return jnp.asarray(rng.standard_normal(shape) / size, jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(random, shapes)
