"""How a computation runs on a mesh: each device computes its own part of the results.

Arrays are known by the letters of their axes. Along the letters `sharded` they stay distributed;
the others are gathered first, but a sharded K or V is an error. G, heads that several of H share,
goes along with H. A result "BTC+H" has the axes B, T
and C, and the results of the devices along H are summed.

Inside `shard_map` the operands already are one device's parts. On an Explicit mesh a computation
opens a `shard_map` of its own from the types of its operands. Otherwise the compiler gets a
partition rule, which costs nothing on a single device.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._operator import check

SHARDED, WHOLE = "BHC", "KV"

Shards: TypeAlias = dict[str, tuple[str, ...]]
"""The mesh axes along which each letter is distributed."""

LocalFn: TypeAlias = Callable[..., tuple[Array, ...]]
"""`fn(shards, *operands)`: what one device computes of its parts of the operands."""


def match_shardings(
    operand_axes: Iterable[str], *operands: Array, axis: Any = None, sharded: str = SHARDED
) -> tuple[Array, ...]:
    """Give all operands the same mesh axes: one sharding on an Explicit mesh, and inside
    `shard_map` the axes over which any operand varies, with `axis` among them.

    This must stand outside a `custom_vjp`, so that each gradient gets its operand's own sharding
    back, and the gradient of a replicated operand is summed over devices.
    """
    axes = tuple(operand_axes)
    if mesh := explicit_mesh(operands):
        shards = _shards(mesh, axes, operands, _specs(operands), sharded)
        operands = _reshard(mesh, shards, axes, operands)
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


def check_heads_unsharded(
    op: str, axes: Sequence[tuple[str, str]], operands: Sequence[Array]
) -> None:
    """Refuse operands of an Explicit mesh that are sharded inside a head, by the names and the axes
    of all."""
    if explicit_mesh(operands):
        _check_heads_unsharded(op, axes, _specs(operands))


def _check_heads_unsharded(op: str, axes: Iterable[tuple[str, str]], specs: Iterable[P]) -> None:
    for (name, letters), spec in zip(axes, specs, strict=True):
        for letter, mesh_axes in zip(letters, spec, strict=False):
            if letter in WHOLE and mesh_axes:
                raise ValueError(
                    f"{op}: {name} [{', '.join(letters)}] is sharded along {letter} over "
                    f"{mesh_axes!r}; accepted are shards of B, H and C, and of T, which is gathered"
                )


def shares_evenly(mesh: Any, groups: int) -> bool:
    """Whether G heads can be distributed along any axes of a mesh. Where they cannot, the H heads
    that share them could not be, either: the compiler would cut an axis of the mesh in two."""
    axes = zip(mesh.shape.values(), mesh.axis_types, strict=True)
    return groups % math.prod(size for size, kind in axes if kind != AxisType.Manual) == 0


def repeated(x: Array, axes: str, like: Array, like_axes: str) -> Array:
    """`x`, which has no axis B, for each batch row of `like`, and sharded as its rows are."""
    sharding = None
    if mesh := explicit_mesh([like]):
        shards = _shards(mesh, [like_axes], [like], _specs([like]), SHARDED)
        sharding = NamedSharding(mesh, spec_of(shards, f"B{axes}"))
    return lax.broadcast(x, (like.shape[like_axes.index("B")],), out_sharding=sharding)


def partitioned(
    op: str,
    fn: LocalFn,
    operand_axes: Sequence[tuple[str, str]],
    result_axes: Sequence[str],
    *,
    sharded: str = SHARDED,
    rule: bool = True,
) -> Callable[..., tuple[Array, ...]]:
    """`fn` run by each device. The operands have their names, of which messages of `op` speak. With
    `rule=False` the compiler partitions `fn` as it sees fit on an Auto mesh."""
    letters = [axes for _, axes in operand_axes]
    found, _, summed = zip(*(axes.partition("+") for axes in result_axes), strict=True)

    def on_mesh(mesh: Any, operands: Sequence[Any], specs: Sequence[P]) -> tuple[Any, Shards]:
        _check_heads_unsharded(op, operand_axes, specs)
        shards = _shards(mesh, letters, operands, specs, sharded)

        def one_device(*operands: Array) -> tuple[Array, ...]:
            over = (tuple(n for x in of_result for n in shards.get(x, ())) for of_result in summed)
            results = zip(fn(shards, *operands), over, strict=True)
            return tuple(lax.psum(x, names) if names else x for x, names in results)

        return one_device, shards

    def call(*operands: Array) -> tuple[Array, ...]:
        manual = AxisType.Manual in {
            kind for x in operands for kind in jax.typeof(x).sharding.mesh.axis_types
        }
        mesh = explicit_mesh(operands)
        # JAX 0.10 cannot differentiate a shard_map inside another one, which `fn` without a rule,
        # left to JAX, may have to be.
        if mesh and (rule or not manual):
            one_device, shards = on_mesh(mesh, operands, _specs(operands))
            return jax.shard_map(
                one_device,
                mesh=mesh,
                in_specs=tuple(spec_of(shards, axes) for axes in letters),
                out_specs=tuple(spec_of(shards, axes) for axes in found),
                axis_names={
                    name
                    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                    if kind == AxisType.Explicit
                },
                check_vma=not any(summed),
            )(*_reshard(mesh, shards, letters, operands))
        if manual or not rule or folds_constants():
            return fn({}, *operands)
        return by_compiler(*operands)

    by_compiler = custom_partitioning(functools.partial(fn, {}))

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        del results
        one_device, shards = on_mesh(mesh, operands, [_spec(x.sharding) for x in operands])
        given, made = (
            tuple(NamedSharding(mesh, spec_of(shards, axes)) for axes in several)
            for several in (letters, found)
        )
        return mesh, one_device, made, given

    def sharding_rule(mesh: Any, operands: Any, results: Any) -> SdyShardingRule:
        del results
        shapes = [x.shape for x in operands]
        of_operands, of_results, sizes = _factors(mesh, letters, shapes, found)
        everything = dict.fromkeys(
            x for names in (*of_operands, *of_results) for name in names for x in _parts(name)
        )
        reduced = [x for x in summed[0] if all(x in y for y in summed)]
        return SdyShardingRule(
            tuple(ArrayMapping(*names) for names in of_operands),
            tuple(ArrayMapping(*names) for names in of_results),
            reduction_factors=tuple(x for x in everything if x in reduced),
            need_replication_factors=tuple(x for x in everything if x not in sharded),
            **sizes,
        )

    by_compiler.def_partition(partition=partition, sharding_rule=sharding_rule)
    return call


def folds_constants() -> bool:
    """Whether JAX evaluates what depends on no operand while it traces, as it does within
    `jax.ensure_compile_time_eval`. Neither rules for the compiler nor Pallas kernels can be traced
    then."""
    config: Any = jax.config  # its annotations lack this option
    return config.eager_constant_folding


def axis_names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The names of the mesh axes that shard one axis of an array."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def check_places(op: str, mesh: Any, places: Mapping[str, Any]) -> None:
    """Check mesh axes by the names of the arguments that they were given as."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"{op}: mesh is a {type(mesh).__name__}; accepted is a jax.sharding.Mesh")
    taken: dict[str, str] = {}
    for place, axes in places.items():
        if not isinstance(axes, str | tuple | None):
            raise TypeError(f"{op}: {place} is {axes!r}; accepted are a name, a tuple and None")
        for axis in axis_names(axes):
            check.choice(op, place, axis, mesh.axis_names)
            if axis in taken:
                raise ValueError(
                    f"{op}: {place} is {axes!r}, and {taken[axis]} is {places[taken[axis]]!r}; "
                    "accepted are different mesh axes"
                )
            taken[axis] = place


def explicit_mesh(operands: Iterable[Array]) -> Any:
    """The mesh of the operands, if it has Explicit axes; else None."""
    meshes = (jax.typeof(x).sharding.mesh for x in operands)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def spec_of(shards: Mapping[str, Any], axes: str) -> P:
    """The spec of an array with these axes, from the mesh axes of each letter."""
    several = (axis_names(shards.get(letter)) for letter in axes)
    return P(*(names if len(names) > 1 else next(iter(names), None) for names in several))


def _specs(operands: Iterable[Array]) -> list[P]:
    return [jax.typeof(x).sharding.spec for x in operands]


def _spec(sharding: Any) -> P:
    """The spec of an operand that the compiler has placed. Where no mesh names the devices, as
    those of unplaced arrays under `jax.set_mesh`, it counts as replicated."""
    return sharding.spec if isinstance(sharding, NamedSharding) else P()


def _reshard(
    mesh: Any, shards: Shards, operand_axes: Iterable[str], operands: Iterable[Array]
) -> tuple[Array, ...]:
    shardings = tuple(NamedSharding(mesh, spec_of(shards, axes)) for axes in operand_axes)
    return _resharded(shardings, *operands)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _resharded(shardings: Sequence[NamedSharding], *operands: Array) -> tuple[Array, ...]:
    """The operands with these shardings. They share a program because JAX takes its devices from
    all operands, and some of them may be on no mesh where a call is not traced."""
    pairs = zip(operands, shardings, strict=True)
    return tuple(jax.sharding.reshard(x, sharding) for x, sharding in pairs)


def _shards(
    mesh: Any,
    operand_axes: Sequence[str],
    operands: Sequence[Any],
    specs: Sequence[P],
    sharded: str,
) -> Shards:
    """The mesh axes of each letter of `sharded`: those of the first operand that is distributed
    along it, without those of other letters. An axis that they do not divide evenly stays whole."""
    shards: Shards = {}
    operand_axes = [axes.replace("G", "H") for axes in operand_axes]
    for spec, axes in zip(specs, operand_axes, strict=True):
        for letter, mesh_axes in zip(axes, spec, strict=False):
            taken = {name for names in shards.values() for name in names}
            free = tuple(name for name in axis_names(mesh_axes) if name not in taken)
            if letter in sharded and letter not in shards and free:
                shards[letter] = free
    for x, axes in zip(operands, operand_axes, strict=True):
        for letter, size in zip(axes, x.shape, strict=True):
            if size % math.prod(mesh.shape[name] for name in shards.get(letter, ())):
                del shards[letter]
    return shards | ({"G": shards["H"]} if "H" in shards else {})


Factor: TypeAlias = str | CompoundFactor


def _factors(
    mesh: Any,
    operand_axes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    result_axes: Sequence[str],
) -> tuple[list[list[Factor]], list[list[Factor]], dict[str, Any]]:
    """The axes of operands and results as a rule of the compiler names them: by their letters, or,
    where an axis has another size than the first one with its letter, by a name of its own. Where G
    and H differ, the heads of H are R for each of G, which has the name H."""
    sizes: dict[str, int] = {}
    for axes, shape in zip(operand_axes, shapes, strict=True):
        for letter, size in zip(axes, shape, strict=True):
            sizes.setdefault(letter, size)
    names: dict[str, Factor] = {}
    of_compound: dict[str, Any] = {}
    groups = sizes.get("G", 0)
    if groups > 0 and shares_evenly(mesh, groups):
        names["G"] = "H"
        if sizes["H"] > groups:
            names["H"], of_compound["R"] = CompoundFactor("H", "R"), sizes["H"] // groups

    def factor(letter: str, size: int) -> Factor:
        return names.get(letter, letter) if sizes[letter] == size else f"{letter}_{size}"

    of_operands = [
        list(map(factor, axes, shape)) for axes, shape in zip(operand_axes, shapes, strict=True)
    ]
    of_results = [[names.get(letter, letter) for letter in axes] for axes in result_axes]
    return of_operands, of_results, of_compound


def _parts(factor: Factor) -> Sequence[str]:
    return [factor] if isinstance(factor, str) else factor
