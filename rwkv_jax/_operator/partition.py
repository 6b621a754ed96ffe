"""How an operator runs on a mesh: each device computes its own batch rows and heads.

The axes B, H and C stay sharded; the other axes but K and V are gathered first; a sharded K or V is
an error. Inside `shard_map` the operands already are one device's shards. On an Explicit mesh the
operator opens a `shard_map` of its own from the types of its operands. Otherwise the compiler gets
a partition rule, which costs nothing on a single device.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

SHARDABLE, WHOLE = "BHC", "KV"

Fn: TypeAlias = Callable[..., tuple[Array, ...]]

Named: TypeAlias = Sequence[tuple[str, str]]
"""The name and the axes of each operand."""


def alike(operand_axes: Iterable[str], *operands: Array, axis: Any = None) -> tuple[Array, ...]:
    """Give all operands the same mesh axes: one sharding on an Explicit mesh, and inside
    `shard_map` the axes over which any operand varies, with `axis` among them.

    This must stand outside a `custom_vjp`, so that each gradient gets its operand's own sharding
    back, and the gradient of a replicated operand is summed over devices.
    """
    axes = tuple(operand_axes)
    if mesh := explicit_mesh(operands):
        operands = _reshard(mesh, _shards(_specs(operands), axes), axes, operands)
    return vary_alike(*operands, axis=axis)


def vary_alike(*operands: Array, axis: Any = None) -> tuple[Array, ...]:
    """Inside `shard_map`, let all operands vary over the same mesh axes: those over which any
    operand varies, and `axis`."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in operands]
    everything = frozenset[str]().union(*varying)
    if axis is not None:
        everything |= jax.typeof(lax.axis_index(axis)).manual_axis_type.varying
    return tuple(
        lax.pcast(x, tuple(everything - mine), to="varying") if everything - mine else x
        for x, mine in zip(operands, varying, strict=True)
    )


def check_whole(op: str, axes: Named, operands: Iterable[Array]) -> None:
    """Refuse operands of an Explicit mesh that are sharded inside a head."""
    if explicit_mesh(operands := tuple(operands)):
        _check_whole(op, axes, _specs(operands))


def _check_whole(op: str, axes: Named, specs: Iterable[P]) -> None:
    for (name, letters), spec in zip(axes, specs, strict=True):
        for letter, mesh_axes in zip(letters, spec, strict=False):
            if letter in WHOLE and mesh_axes:
                raise ValueError(
                    f"{op}: {name} [{', '.join(letters)}] is sharded along {letter} over "
                    f"{mesh_axes!r}; accepted are shards of B, H and C, and of T, which is gathered"
                )


def repeated(x: Array, axes: str, like: Array, like_axes: str) -> Array:
    """`x`, which has no axis B, for each batch row of `like`, and sharded as its rows are."""
    sharding = None
    if mesh := explicit_mesh([like]):
        sharding = NamedSharding(mesh, spec_of(_shards(_specs([like]), [like_axes]), f"B{axes}"))
    return lax.broadcast(x, (like.shape[like_axes.index("B")],), out_sharding=sharding)


def partitioned(
    op: str, fn: Fn, names: Named, result_axes: Sequence[str], *, rule: bool = True
) -> Fn:
    """`fn` run per device. With `rule=False` the compiler partitions `fn` as it sees fit on an Auto
    mesh, which keeps `fn` differentiable."""
    operand_axes = [axes for _, axes in names]

    def call(*operands: Array) -> tuple[Array, ...]:
        manual = AxisType.Manual in {
            kind for x in operands for kind in jax.typeof(x).sharding.mesh.axis_types
        }
        mesh = explicit_mesh(operands)
        # JAX 0.10 cannot differentiate a shard_map inside another one: hence `rule`.
        if mesh and (rule or not manual):
            return _explicit(fn, mesh, operand_axes, result_axes)(*operands)
        if manual:
            return fn(*operands)
        return (_auto(op, fn, names, result_axes) if rule else fn)(*operands)

    return call


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the mesh axes that shard one axis of an array."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def explicit_mesh(operands: Iterable[Array]) -> Any:
    """The mesh of the operands, if it has Explicit axes; else None."""
    meshes = (jax.typeof(x).sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def _specs(operands: Iterable[Array]) -> list[P]:
    return [jax.typeof(x).sharding.spec for x in operands]


def _reshard(
    mesh: Any, shards: dict[str, Any], operand_axes: Iterable[str], operands: Iterable[Array]
) -> tuple[Array, ...]:
    return tuple(
        jax.sharding.reshard(x, NamedSharding(mesh, spec_of(shards, axes)))
        for x, axes in zip(operands, operand_axes, strict=True)
    )


def spec_of(shards: Mapping[str, Any], axes: str) -> P:
    """The spec of an array with these axes, from the mesh axes of each letter."""
    return P(*(shards.get(letter) for letter in axes))


def _shards(specs: Iterable[P], operand_axes: Sequence[str]) -> dict[str, Any]:
    """The mesh axes of each shardable letter: those of the first operand sharded along it."""
    shards: dict[str, Any] = {}
    taken: set[str] = set()
    for spec, axes in zip(specs, operand_axes, strict=True):
        for letter, mesh_axes in zip(axes, spec, strict=False):
            names = set(axis_names(mesh_axes))
            if letter in SHARDABLE and letter not in shards and names and not names & taken:
                shards[letter] = mesh_axes
                taken |= names
    return shards


def _explicit(fn: Fn, mesh: Any, operand_axes: Sequence[str], result_axes: Sequence[str]) -> Fn:
    names = {
        n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit
    }

    def call(*operands: Array) -> tuple[Array, ...]:
        shards = _shards(_specs(operands), operand_axes)
        return jax.shard_map(
            fn,
            mesh=mesh,
            in_specs=tuple(spec_of(shards, axes) for axes in operand_axes),
            out_specs=tuple(spec_of(shards, axes) for axes in result_axes),
            axis_names=names,
        )(*_reshard(mesh, shards, operand_axes, operands))

    return call


def _auto(op: str, fn: Fn, names: Named, result_axes: Sequence[str]) -> Fn:
    operand_axes = [axes for _, axes in names]
    call = custom_partitioning(fn)
    # The letters in the order in which they appear, as the rule wants its special factors.
    letters = dict.fromkeys("".join((*operand_axes, *result_axes)))

    def partition(mesh: Any, operands: Any, results: Any):
        specs = [x.sharding.spec for x in operands]
        _check_whole(op, names, specs)
        shards = _shards(specs, operand_axes)
        place = [
            NamedSharding(mesh, spec_of(shards, axes)) for axes in (*operand_axes, *result_axes)
        ]
        return mesh, fn, tuple(place[len(operand_axes) :]), tuple(place[: len(operand_axes)])

    call.def_partition(
        partition=partition,
        sharding_rule=SdyShardingRule(
            tuple(ArrayMapping(*axes) for axes in operand_axes),
            tuple(ArrayMapping(*axes) for axes in result_axes),
            need_replication_factors=tuple(x for x in letters if x not in SHARDABLE),
        ),
    )
    return call
