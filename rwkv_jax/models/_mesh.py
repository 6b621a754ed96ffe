"""How a model runs on an Explicit mesh, and where the states are that it makes.

The compiler partitions a model by the rules of its operators and layer functions. It does so on an
Explicit mesh as well, because the axes of the mesh are Auto ones within the model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax import Array, core, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from rwkv_jax._operator.partition import axis_names, explicit_mesh
from rwkv_jax.models._kernels import Kernels
from rwkv_jax.models._stacking import Stacked, is_stacked

Tree = TypeVar("Tree")


def beside(tree: Tree, like: Any) -> Tree:
    """The arrays on the devices where `like` is, whole on each of them."""
    if isinstance(like, core.Tracer):
        if mesh := explicit_mesh([like]):
            # An argument of a program that nothing uses does not tell its devices.
            tree, _ = lax.optimization_barrier((tree, like))
            return jax.sharding.reshard(tree, NamedSharding(mesh, PartitionSpec()))
        return tree
    if not isinstance(like, Array) or not like.committed:
        return tree
    sharding = like.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.device_put(tree, sharding)


def partitioned(compute: Callable[..., Any], *operands: Any, results: Callable[[], Any]) -> Any:
    """`compute(*operands)`. On an Explicit mesh the compiler partitions it as on an Auto one, and
    `results` gives the `PartitionSpec` of each result."""
    if (mesh := _explicit(operands)) is None:
        return compute(*operands)
    return jax.sharding.auto_axes(compute, out_sharding=_on(mesh, results()))(*operands)


def as_explicit(what: str, kernels: Kernels, operands: Any, like: Array) -> Kernels:
    """`kernels` for calls from within `partitioned` with these operands. Where that makes the axes
    of a mesh Auto, they are Explicit for `wkv`, and its tokens distributed as those of `like`."""
    wkv, mesh = kernels.wkv, _explicit(operands)
    if wkv is None or mesh is None:
        return kernels
    if not isinstance(like, core.Tracer) and jax.sharding.get_abstract_mesh().empty:
        raise ValueError(
            f"{what}: kernels has a wkv on an Explicit mesh; accepted are calls within jax.jit or "
            "jax.set_mesh, or None"
        )
    rows, tokens = (PartitionSpec(*tuple(spec_of(like))[:i]) for i in (1, 2))

    def call(*operands: Any, segment_ids: Array | None = None, **options: Any) -> Any:
        def of_mesh(inputs: Any, state: Any, segments: Any) -> Any:
            return wkv(*inputs, state, **segments, **options)

        *inputs, state = operands
        segments = {} if segment_ids is None else {"segment_ids": segment_ids}
        # Parameters have fewer axes than [B, T, C].
        of_inputs = [tokens if x.ndim > 2 else PartitionSpec() for x in inputs]
        places = _on(mesh, (of_inputs, rows, tokens))
        call_of_mesh: Any = jax.sharding.explicit_axes(of_mesh, in_sharding=places)
        return call_of_mesh(inputs, state, segments)

    return dataclasses.replace(kernels, wkv=call)


def _explicit(operands: Any) -> Any:
    """The Explicit mesh of a call, or None. Inside a `shard_map` the operands already are one
    device's shards."""
    mesh = explicit_mesh(jax.tree.leaves(operands))
    return None if mesh is None or AxisType.Manual in mesh.axis_types else mesh


def _on(mesh: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def spec_of(x: Array) -> PartitionSpec:
    """How an array is distributed on an Explicit mesh."""
    return PartitionSpec(*jax.typeof(x).sharding.spec)


def spec_of_product(x: Array, weight: Array) -> PartitionSpec:
    """How the product of `x` with a matrix [outputs, inputs] is distributed on an Explicit mesh."""
    *rows, _ = spec_of(x)
    taken = {name for axes in rows for name in axis_names(axes)}
    outputs = (*spec_of(weight), None)[0]
    return PartitionSpec(*rows, None if taken & {*axis_names(outputs)} else outputs)


def specs_of_hidden_states(params: Any, tokens: Array, state: Any) -> Any:
    """How the hidden states of `tokens` and the next state are distributed on an Explicit mesh."""
    stacked = isinstance(params.blocks, Stacked)
    return spec_of(tokens), specs_of_next(state, tokens, stacked=stacked)


def specs_of_next(state: Any, like: Array, *, stacked: bool = False) -> Any:
    """How the state after `state` is distributed on an Explicit mesh: as `state`, so that a loop
    can carry it, or if that is None or on no mesh, as the rows of `like`."""
    rows = tuple(spec_of(like))[:1]
    of_blocks = PartitionSpec(None, *rows)
    rows = PartitionSpec(*rows)
    if state is None:
        return Stacked(rows, of_blocks) if stacked else rows

    def spec(path: KeyPath, x: Array) -> PartitionSpec:
        if jax.typeof(x).sharding.mesh.empty:
            return of_blocks if is_stacked(path) else rows
        return spec_of(x)

    return jax.tree_util.tree_map_with_path(spec, state)
