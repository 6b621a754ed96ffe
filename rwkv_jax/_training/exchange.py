"""What devices exchange of parameters and of their gradients.

A parameter is distributed along the mesh axes `OVER`, and computed with as a whole, or as the part
of it that belongs to a device along "model". It travels in the dtype of the activations. A gradient
travels in the dtype in which it was computed: that of the activations for the matrices of blocks,
which products give in this dtype on one device too, and float32 for all others. Each device gets
the sum of its own part alone.

The functions run inside a `shard_map` over the whole mesh. With `check_vma` the transpose of
`all_gather` is `psum_scatter`, and that of `pcast` is `psum`.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from rwkv_jax._training.embedding import look_up
from rwkv_jax.models._recomputation import save_under_mixes

OVER = ("data", "seq")
"""The mesh axes along which the parameters and the state of the optimizer are distributed."""

Tree = TypeVar("Tree")


def axis_over(place: NamedSharding) -> int | None:
    """The axis of a parameter that is distributed along `OVER`, where there are several devices, or
    None."""
    if math.prod(place.mesh.shape[name] for name in OVER) == 1:
        return None
    return next((i for i, names in enumerate(place.spec) if names == OVER), None)


def whole(x: Array, place: NamedSharding) -> Array:
    """A parameter from the shards of all devices along `OVER`. One that is not distributed counts
    from here on as different on each device, so that its gradient is summed over all of them."""
    axis = axis_over(place)
    return varying(x) if axis is None else lax.all_gather(x, OVER, axis=axis, tiled=True)


def gathered(
    places: Mapping[str, NamedSharding],
    gather: Callable[[str, Array], Array],
    block: Any,
    x: Array,
    of_first: Any,
) -> Any:
    """The parameters of a block that `gather` gives, each from its name, with what else the block
    takes. `places` are those of the parameters.

    The backward pass of the block before does not end before the gradients of this block are
    scattered. The compiler would otherwise keep the whole gradients of all blocks, and exchange
    them after the last product, when nothing is left to be computed meanwhile.
    """

    def whole(block: Any) -> Any:
        return _by_name(gather, block)

    @jax.custom_vjp
    def passed(block: Any, x: Array, of_first: Any) -> Any:
        return whole(block), x, of_first

    def forward(block: Any, x: Array, of_first: Any) -> Any:
        found, scatter = jax.vjp(whole, block)
        return (found, x, of_first), scatter

    def backward(scatter: Any, cotangents: Any) -> Any:
        dwhole, dx, dfirst = cotangents
        (dblock,) = scatter(dwhole)
        if dfirst is not None:
            # All blocks pass it on to the block before. It has waited for the block after.
            dx, dfirst = lax.optimization_barrier((dx, dfirst))
            leaves, tree = jax.tree.flatten(dblock)
            names = _by_name(lambda name, _: name, dblock)
            scattered = [axis_over(places[name]) is not None for name in jax.tree.leaves(names)]
            waited = [x for x, is_part in zip(leaves, scattered, strict=True) if is_part]
            waited, dfirst = lax.optimization_barrier((waited, dfirst))
            parts = iter(waited)
            leaves = [
                next(parts) if is_part else x for x, is_part in zip(leaves, scattered, strict=True)
            ]
            dblock = jax.tree.unflatten(tree, leaves)
        return dblock, dx, dfirst

    passed.defvjp(forward, backward)
    block, x, of_first = passed(block, x, of_first)
    return jax.tree.map(save_under_mixes, block), x, of_first


@jax.custom_vjp
def scattered_before(weight: Array, last: Array) -> Array:
    """`weight`, of which the gradient is scattered before the backward pass needs that of `last`, a
    result of one of the last blocks. That is the weight of the head, whose gradient comes first of
    all."""
    return weight


def _scattered_before_backward(last: Array, dweight: Array) -> tuple[Array, Array]:
    return lax.optimization_barrier((dweight, jnp.zeros_like(last)))


scattered_before.defvjp(lambda weight, last: (weight, last), _scattered_before_backward)


def _by_name(f: Callable[[str, Array], Any], tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda path, x: f(jax.tree_util.keystr(path, simple=True, separator="."), x), tree
    )


def varying(x: Array, axes: tuple[str, ...] = OVER) -> Array:
    """`x`, which counts from here on as different on each device along `axes`, so that its gradient
    is summed over those where it is the same."""
    missing = tuple(name for name in axes if name not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def rounded_head(x: Array, place: NamedSharding, dtype: DTypeLike) -> Array:
    """The weight of the head, rounded to `dtype`, but with a gradient in its own."""
    return _rounded_head(dtype, axis_over(place), varying(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounded_head(dtype: DTypeLike, axis: int | None, x: Array) -> Array:
    # The loss rounds it again, and the compiler removes both casts of the whole weight.
    narrow = x.astype(dtype)
    if axis is not None:
        narrow = lax.all_gather(narrow, OVER, axis=axis, tiled=True)
    return narrow.astype(x.dtype)


def _rounded_head_backward(dtype: Any, axis: int | None, _: None, dx: Array) -> tuple[Array]:
    del dtype
    if axis is None:
        return (dx,)
    return (lax.psum_scatter(dx, OVER, scatter_dimension=axis, tiled=True),)


_rounded_head.defvjp(lambda *args: (_rounded_head(*args), None), _rounded_head_backward)


def embedding(table: Array, tokens: Array, place: NamedSharding, dtype: DTypeLike) -> Array:
    """The embedding of this device's tokens [B, T], from its part of the table.

    Where there are fewer tokens than rows of the table, each device looks up its channels of the
    tokens of all devices, and sends each device those of its own tokens. Neither the table nor its
    gradient is then whole on any device.
    """
    axis = axis_over(place)
    exchanges = axis is not None and tokens.size < table.shape[0]
    if exchanges:
        tokens = lax.all_gather(tokens, OVER)
    else:
        table = whole(table, place)
    model = place.spec[0] if len(place.spec) else None
    tokens, table = varying(tokens), varying(table)
    if model is not None:
        # Each device has the rows of its part of the vocabulary, and zeros for all others.
        tokens -= lax.axis_index(model) * table.shape[0]
    rows = look_up(table, tokens, dtype)
    if exchanges:
        rows = lax.all_to_all(rows, OVER, split_axis=0, concat_axis=3, tiled=True)[0]
    return rows if model is None else lax.psum(rows, model)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def constrained(place: NamedSharding, gathered: NamedSharding, x: Array) -> Array:
    """A parameter that is at `place`, where the compiler gathers it to. Its gradient goes the way
    back before it is cast: only then does the compiler make one collective of its sum over devices
    and the part of it that a device takes."""
    return lax.with_sharding_constraint(x, gathered)


constrained.defvjp(
    lambda place, gathered, x: (constrained(place, gathered, x), None),
    lambda place, gathered, _, dx: (
        lax.with_sharding_constraint(lax.with_sharding_constraint(dx, gathered), place),
    ),
)
