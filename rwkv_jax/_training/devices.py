"""The mesh of devices, and how arrays get onto it."""

import math
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

AXES = ("data", "model", "seq")

Tree = TypeVar("Tree")


def make_mesh(
    given: Mapping[str, int] | None,
    config: Any,
    *,
    batch: int,
    context: int,
    parts: int = 1,
    gathers: bool = False,
) -> Mesh:
    """The devices of --mesh, which is `given`. An axis that it does not name has one device.

    `parts` is that of --accumulate. `gathers` says that steps gather parameters block by block.
    Where it exchanges less to gather them along "model" as well, "model" becomes a part of "data".
    """
    given = given or {}
    sizes = {axis: 1 for axis in AXES if axis not in given} | dict(given)
    count, present = math.prod(sizes.values()), jax.device_count()
    if count > present or (jax.process_count() > 1 and count < present):
        accepted = "at most that many" if jax.process_count() == 1 else "all of them"
        sys.exit(f"--mesh has {count} devices where there are {present}; accepted are {accepted}")
    for axis, name, size in (
        ("data", "--batch", batch),
        ("model", "the number of heads", config.hidden_size // config.head_size),
        ("seq", "--context", context),
    ):
        if size % sizes[axis]:
            sys.exit(
                f"--mesh has {axis}={sizes[axis]} where {name} is {size}; "
                f"accepted is what divides {size}"
            )
    if gathers and _rows_suffice(sizes, config.hidden_size, batch // parts, context):
        sizes |= {"data": sizes["data"] * sizes["model"], "model": 1}
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:count],
    )


def _rows_suffice(sizes: Mapping[str, int], width: int, rows: int, context: int) -> bool:
    """Whether there are enough rows to distribute them along "model" as well, and enough tokens.

    A block has 12 `width`^2 parameters. Along "data" devices exchange at most 6 bytes for each of
    them, and along "model" 16 `width` bytes for each token, sums of activations. What they exchange
    of the head is left out.
    """
    tokens = rows * context // (sizes["data"] * sizes["seq"])
    is_even = rows % (sizes["data"] * sizes["model"]) == 0
    return is_even and 16 * tokens * width >= 6 * 12 * width**2


def place(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """An array on the mesh. All processes have `x`, and each gives its own devices their shards."""
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def gathered(tree: Tree, mesh: Mesh) -> Tree:
    """The same arrays, whole on each device.

    This is one program, while `device_put` would start one for each array: over processes on CPUs
    programs that run at once may wait for each other without end.
    """
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(tree)


def describe(mesh: Mesh, given: Mapping[str, int] | None) -> str:
    """The first device of the mesh that was made of `given`, and the axes that have more."""
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    if mesh.shape["model"] < (given or {}).get("model", 1):
        axes += ", which exchanges less here than along model"
    return f"{mesh.devices.flat[0]}" + (f" and others ({axes})" if axes else "")
