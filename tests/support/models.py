"""Small models with random parameters."""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from rwkv_jax.models import rwkv4, rwkv7

VOCABULARY = 61
_SIZES = {"num_layers": 2, "hidden_size": 32, "head_size": 16, "vocab_size": VOCABULARY}


def parameters(module: ModuleType) -> Any:
    """Random parameters of a generation, with sizes at which all of them count."""
    sizes = {name: x for name, x in _SIZES.items() if module is not rwkv4 or name != "head_size"}
    config = module.Config(**sizes)
    shapes = jax.eval_shape(lambda key: module.init(key, config), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), shapes
    )


_RANKS = {"w": 40, "a": 8, "v": 16, "g": 72}


def with_heads_of_64(width: int, dtype: str, layers: int = 2) -> rwkv7.Params:
    """Random parameters of RWKV-7 with heads of 64 channels, where activations stay near 1. The
    ranks of low-rank maps differ."""
    config = rwkv7.Config(layers, width, vocab_size=11)
    shapes = jax.eval_shape(lambda key: rwkv7.init(key, config), jax.random.key(0))
    rng = np.random.default_rng(width)

    def random(path: KeyPath, x: jax.ShapeDtypeStruct) -> jax.Array:
        name, shape = jax.tree_util.keystr(path[-1:], simple=True), list(x.shape)
        if len(name) == 2 and name[1] in "12":
            shape[name[1] == "1"] = _RANKS[name[0]]
        size = math.sqrt(shape[-1]) if len(shape) > 1 else 1.5
        return jnp.asarray(rng.standard_normal(shape) / size, jnp.dtype(dtype))

    return jax.tree_util.tree_map_with_path(random, shapes)
