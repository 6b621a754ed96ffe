"""The groups of parameters of the official training: which learn faster, and which decay.

Source: `configure_optimizers` of RWKV-LM's training code, in RWKV-v4neo (RWKV-4), RWKV-v5 (5 and 6)
and RWKV-v7/train_temp (7), with `layerwise_lr` and outside its second stage for the Pile.
"""

import jax
from jax import Array
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from rwkv_jax.models import _parameters

_FASTER = {"att.time_decay": 2.0, "att.time_first": 3.0, "att.w0": 2.0}


def learning_rates(params: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[float]:
    """The factor of the learning rate of each parameter: 2 for the offset of the decay, 3 for the
    bonus `time_first` of RWKV-4 and 5.0, and 1 for all others. With optax, after the decay of the
    weights and before the learning rate:

        optax.stateless(lambda updates, _: jax.tree.map(operator.mul, updates, factors))

    `params` are parameters in either form, or a tree of a Flax NNX or Equinox module that has them,
    such as `nnx.state(model, nnx.Param)`. In place of an `nnx.Param` the result has the number, as
    `nnx.Optimizer` needs it.
    """

    def factor(path: KeyPath, _: Array | jax.ShapeDtypeStruct) -> float:
        name = _parameters.name(path)
        return next((by for end, by in _FASTER.items() if name.endswith(end)), 1.0)

    return jax.tree_util.tree_map_with_path(factor, _parameters.arrays(params))


def weight_decays(params: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[bool]:
    """Whether the official training has weight decay for a parameter: for the embedding, the head
    and the matrices of the linear maps, but not for low-rank maps and vectors. It is a mask for
    `optax.add_decayed_weights`.

    `params` are those of `learning_rates`, of which the result has the form.
    """

    def decays(path: KeyPath, x: Array | jax.ShapeDtypeStruct) -> bool:
        name = _parameters.name(path)
        return name.endswith(".weight") and x.ndim - ("blocks.rest." in name) == 2

    return jax.tree_util.tree_map_with_path(decays, _parameters.arrays(params))
