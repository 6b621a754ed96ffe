"""Where the parameters are on a mesh."""

from jax.sharding import Mesh, NamedSharding
from jaxtyping import PyTree

from rwkv_jax.models import _placement
from rwkv_jax.models._trees import Params

_RULES: _placement.Rules = (
    *_placement.LINEAR,
    (("time_decay", "time_faaaa", "time_first", "ln_x.weight", "ln_x.bias"), ("model",)),
)


def shardings(
    params: Params,
    mesh: Mesh,
    *,
    data: _placement.MeshAxes = None,
    model: _placement.MeshAxes = None,
) -> PyTree[NamedSharding]:
    """Where the parameters are on a mesh: a tree of `NamedSharding`, for `jit` and `device_put`.

    The arguments, results and errors are those of `rwkv7.shardings`.
    """
    return _placement.shardings(params, mesh, _RULES, data=data, model=model)
