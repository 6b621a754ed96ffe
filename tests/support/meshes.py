"""Meshes of the forced CPU devices, and arrays placed on them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

PLACES: dict[str, Any] = {
    "data=2,seq=2": {"batch": "data", "sequence": "seq"},
    "model=2,seq=2": {"heads": "model", "sequence": "seq"},
    "data=2,model=2": {"batch": "data", "heads": "model"},
    "seq=4": {"sequence": "seq"},
    "seq=2": {"sequence": "seq"},
    "outer=2,inner=2": {"sequence": ("outer", "inner")},
}
"""Where `sharding.shard` puts the axes of an operator on the axes of a mesh, for each mesh."""


def mesh(axes: str, axis_type: AxisType, devices: Sequence[Any]) -> Mesh:
    """A mesh of the axes in a text such as "data=2,seq=2", over as many devices as these need."""
    names, numbers = zip(*(axis.split("=") for axis in axes.split(",")), strict=True)
    sizes, types = tuple(map(int, numbers)), (axis_type,) * len(names)
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices[: math.prod(sizes)])


def put(
    mesh: Mesh, specs: Mapping[str, PartitionSpec], arrays: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """Arrays by name, each sharded as the spec of its name says."""
    return {n: jax.device_put(x, NamedSharding(mesh, specs[n])) for n, x in arrays.items()}
