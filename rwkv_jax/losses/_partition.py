"""How a loss runs on a mesh: each device computes its own tokens with its own part of the weight.

Channels are gathered first, and so are parts of the vocabulary along mesh axes that distribute
tokens as well. Then devices exchange a few numbers for each token, and sums of losses and of
gradients. Inside a `shard_map` the operands already are one device's parts. On an Explicit mesh the
function runs in a `shard_map` of its own, from the types of its operands. Otherwise the compiler
gets a partition rule, which costs nothing on a single device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rwkv_jax._operator.partition import axis_names, explicit_mesh, vary_alike
from rwkv_jax.losses._options import Axis

TOKENS, VOCABULARY, CHANNELS = "t", "v", "c"
"""The letters of axes. An array has as many axes t as its tokens have."""

Fn: TypeAlias = Callable[..., tuple[Array, ...]]
"""A function of the mesh axes of the vocabulary and of operands."""

Specs: TypeAlias = Sequence[P]


@dataclass(frozen=True)
class Axes:
    """The axes of an array. A result is the sum over the devices along the axes `summed`."""

    letters: str
    summed: str = ""


def alike(operands: Sequence[Array], axes: Sequence[Axes], axis: Axis) -> tuple[Array, ...]:
    """The operands as `distributed` takes them: on an Explicit mesh sharded as the features and
    the weight are, and inside `shard_map` varying over the same mesh axes, with `axis` among them.

    This must stand outside a `custom_vjp`, so that each gradient gets its operand's own sharding
    back, and the gradient of a replicated operand is summed over devices.
    """
    if mesh := explicit_mesh(operands):
        places = _Places(mesh, _specs(operands), operands)
        operands = [
            jax.sharding.reshard(x, NamedSharding(mesh, places.spec(of_x)))
            for x, of_x in zip(operands, axes, strict=True)
        ]
    return vary_alike(*operands, axis=axis)


def distributed(
    fn: Fn,
    axis: Axis,
    operands: Sequence[Array],
    operand_axes: Sequence[Axes],
    result_axes: Sequence[Axes],
) -> tuple[Array, ...]:
    """The results of `fn` for operands that may be distributed; `vmap` computes one after another.

    The first operand has tokens and channels, the second one the vocabulary and channels. `axis`
    are the mesh axes of the vocabulary inside a `shard_map`, where a result is not summed.
    """

    def on_mesh(mesh: Any, specs: Specs, operands: Sequence[Any]) -> tuple[Any, Specs, Specs]:
        """The function of one device, and the specs of its operands and of its results."""
        places = _Places(mesh, specs, operands)

        def one_device(*operands: Array) -> tuple[Array, ...]:
            results = fn(places.vocabulary or None, *operands)
            return tuple(
                lax.psum(x, names) if (names := places.names(of_x.summed)) else x
                for x, of_x in zip(results, result_axes, strict=True)
            )

        given, found = (tuple(map(places.spec, several)) for several in (operand_axes, result_axes))
        return one_device, given, found

    @custom_vmap
    def call(*operands: Array) -> tuple[Array, ...]:
        kinds = {kind for x in operands for kind in jax.typeof(x).sharding.mesh.axis_types}
        if AxisType.Manual in kinds:
            return fn(axis, *operands)
        if mesh := explicit_mesh(operands):
            one_device, given, found = on_mesh(mesh, _specs(operands), operands)
            explicit = {
                name
                for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
                if kind == AxisType.Explicit
            }
            return jax.shard_map(
                one_device,
                mesh=mesh,
                in_specs=given,
                out_specs=found,
                axis_names=explicit,
                check_vma=False,
            )(*operands)
        return automatic(*operands)

    @custom_partitioning
    def automatic(*operands: Array) -> tuple[Array, ...]:
        return fn(None, *operands)

    def partition(mesh: Any, operands: Any, results: Any) -> Any:
        one_device, given, found = on_mesh(mesh, [x.sharding.spec for x in operands], operands)
        given, found = (
            tuple(NamedSharding(mesh, spec) for spec in several) for several in (given, found)
        )
        return mesh, one_device, found, given

    automatic.def_partition(
        partition=partition,
        sharding_rule=SdyShardingRule(
            tuple(map(_factors, operand_axes)),
            tuple(map(_factors, result_axes)),
            need_replication_factors=(CHANNELS,),
        ),
    )

    @call.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Array) -> Any:
        def one(own: Sequence[Array]) -> tuple[Array, ...]:
            of_one: Iterator[Array] = iter(own)
            return call(*(next(of_one) if m else x for x, m in zip(operands, mapped, strict=True)))

        results = lax.map(one, [x for x, m in zip(operands, mapped, strict=True) if m])
        return results, (True,) * len(results)

    return call(*operands)


class _Places:
    """Which mesh axes distribute the tokens, for each of their axes, and the vocabulary: those of
    the first two operands. An axis that does not divide evenly is whole on each device."""

    def __init__(self, mesh: Any, specs: Specs, operands: Sequence[Any]) -> None:
        features, weight = operands[:2]

        def names(axes: Any, size: int) -> tuple[str, ...]:
            devices = math.prod(mesh.shape[name] for name in axis_names(axes))
            return axis_names(axes) if size % devices == 0 else ()

        of_features = [*specs[0], *[None] * features.ndim][: features.ndim - 1]
        self.tokens = [names(*x) for x in zip(of_features, features.shape, strict=False)]
        """The mesh axes of each axis of tokens."""
        taken = {name for several in self.tokens for name in several}
        free = tuple(x for x in axis_names([*specs[1], None][0]) if x not in taken)
        self.vocabulary = names(free, weight.shape[0])

    def names(self, letters: str) -> tuple[str, ...]:
        """The mesh axes of some axes together."""
        tokens = tuple(name for several in self.tokens for name in several)
        places = {TOKENS: tokens, VOCABULARY: self.vocabulary, CHANNELS: ()}
        return tuple(name for letter in letters for name in places[letter])

    def spec(self, axes: Axes) -> P:
        tokens = iter(self.tokens)
        return P(*((next(tokens) if x == TOKENS else self.names(x)) or None for x in axes.letters))


def _specs(operands: Sequence[Array]) -> Specs:
    return [jax.typeof(x).sharding.spec for x in operands]


def _factors(axes: Axes) -> ArrayMapping:
    """The axes with a name each, as a sharding rule has them."""
    return ArrayMapping(*(f"{x}{i}" if x == TOKENS else x for i, x in enumerate(axes.letters)))
