"""Where the parameters of a model are on a mesh."""

import math
from typing import Literal, TypeAlias

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from rwkv_jax._operator.partition import axis_names, check_places
from rwkv_jax.models import _parameters, _stacking

Axis: TypeAlias = Literal["data", "model"]
Rules: TypeAlias = tuple[tuple[tuple[str, ...], tuple[Axis, ...]], ...]
"""Endings of the names of parameters, and what the leading axes of these parameters are distributed
along. The first rule that fits a name counts; a parameter without a rule is whole on each device.
"""

_BY_OUTPUT = ("emb", "head", "receptance", "key", "gate", "att.value")
_BY_INPUT = ("output", "ffn.value")
_PARTS = ("weight", "scale")
LINEAR: Rules = (
    (tuple(f"{name}.{part}" for name in _BY_OUTPUT for part in _PARTS), ("model", "data")),
    (tuple(f"{name}.{part}" for name in _BY_INPUT for part in _PARTS), ("data", "model")),
    (("ffn.value.by_input",), ("model", "data")),
)
"""The rules for embedding, head and linear maps. The groups of a scale are where their inputs
are."""

MeshAxes: TypeAlias = str | tuple[str, ...] | None


def shardings(
    params: PyTree[Array | jax.ShapeDtypeStruct],
    mesh: Mesh,
    rules: Rules,
    heads: int,
    *,
    data: MeshAxes = None,
    model: MeshAxes = None,
) -> PyTree[NamedSharding]:
    """The sharding of each parameter. An axis that does not divide evenly stays whole, and so do
    the channels of a time mixing whose `heads` do not divide evenly.

    Raises:
      TypeError, ValueError: as `check_places` raises them.
    """
    along: dict[Axis, MeshAxes] = {"data": data, "model": model}
    check_places("shardings", mesh, {"data": data, "model": model})
    devices = {
        axis: math.prod(mesh.shape[name] for name in axis_names(names))
        for axis, names in along.items()
    }

    def sharding(path: KeyPath, x: Array | jax.ShapeDtypeStruct) -> NamedSharding:
        # The weight beside which a low-rank part is has the place of a weight by itself.
        name = _parameters.name(path).replace(".base.", ".")
        axes = next((axes for endings, axes in rules if name.endswith(endings)), ())
        blocks = _stacking.block_axes(path)

        def whole_heads(axis: Axis) -> bool:
            return ".att." not in name or heads % devices[axis] == 0

        has_free_rows = axes == ("model", "data") and devices["model"] == 1 and "emb." not in name
        if has_free_rows and x.shape[blocks] % devices["data"] == 0 and whole_heads("data"):
            # A matrix gathered from columns would be transposed, and so would its gradient. Devices
            # look up tokens in columns of embeddings, DeepEmbed's too. Where parameters are not
            # gathered, the compiler may distribute the outputs of a matrix as its rows, and those
            # of a time mixing have to be whole heads.
            axes = ("data",)
        spec = (
            along[axis]
            if size % devices[axis] == 0 and (axis == "data" or whole_heads(axis))
            else None
            for size, axis in zip(x.shape[blocks:], axes, strict=False)
        )
        return NamedSharding(mesh, PartitionSpec(*(None,) * blocks, *spec))

    return jax.tree_util.tree_map_with_path(sharding, params)
