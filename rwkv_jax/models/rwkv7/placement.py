"""Where the parameters are on a mesh."""

from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from rwkv_jax.models import _placement
from rwkv_jax.models._trees import Params

_RULES: _placement.Rules = (
    *_placement.LINEAR,
    (("w1", "a1", "v1", "g1"), ("data",)),
    (("w2", "a2", "v2", "g2"), ("data", "model")),
    (("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias"), ("model",)),
)


def shardings(
    params: Params,
    mesh: Mesh,
    *,
    data: _placement.MeshAxes = None,
    model: _placement.MeshAxes = None,
) -> PyTree[NamedSharding]:
    """Where the parameters are on a mesh: a tree of `NamedSharding`, for `jit` and `device_put`.

    With `data`, each device keeps a part of the parameters, and of every tree with the shapes of
    the parameters, such as the moments of an optimizer. Gather the parameters along these axes
    before computing with them, because the compiler may not do so by itself:

        jax.lax.with_sharding_constraint(params, shardings(params, mesh, model="model"))

    Args:
      params: the parameters, or their shapes.
      mesh: a mesh with axes of type Auto.
      data: mesh axes that only save memory, such as the axes of the batch.
      model: mesh axes that split the heads, the channels within the mixings and the vocabulary.

    Returns:
      The tree of `params` with a sharding at each leaf. An axis that does not divide evenly stays
      whole.

    Raises:
      ValueError: `data` or `model` names an axis that the mesh does not have.
    """
    return _placement.shardings(params, mesh, _RULES, data=data, model=model)
