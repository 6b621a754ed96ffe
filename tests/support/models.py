"""Small models with random parameters."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rwkv_jax.models import rwkv4

VOCABULARY = 61
_SIZES = {"layers": 2, "width": 32, "head_size": 16, "vocabulary": VOCABULARY}


def parameters(module: ModuleType) -> Any:
    """Random parameters of a generation, with sizes at which all of them count."""
    sizes = {name: x for name, x in _SIZES.items() if module is not rwkv4 or name != "head_size"}
    config = module.Config(**sizes)
    shapes = jax.eval_shape(lambda key: module.init(key, config), jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), jnp.float32), shapes
    )
