"""How a model goes through its blocks, one after another or in a scan, and what it adds there."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, core, lax

from rwkv_jax._operator.dispatch import in_program_of_one_device
from rwkv_jax.models import _recomputation
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._trees import BlockParams, BlockState, State

Block: TypeAlias = Callable[
    [BlockParams, Array, Any, BlockState | None], tuple[Array, Any, BlockState]
]


def in_turn(
    block: Block, blocks: tuple[BlockParams, ...], x: Array, state: tuple[BlockState, ...] | None
) -> tuple[Array, State]:
    """The activations after all blocks, and the next state."""
    if isinstance(x, core.Tracer):
        block = jax.jit(block)  # so that blocks of the same shapes are traced and lowered once
    of_first = None
    next_state = []
    for p, s in zip(blocks, state or (None,) * len(blocks), strict=True):
        x, of_first, after = block(p, x, of_first, s)
        next_state.append(after)
    return x, tuple(next_state)


def scan(
    block: Block,
    body: Block,
    blocks: Stacked,
    x: Array,
    state: Stacked | None,
) -> tuple[Array, State]:
    """`in_turn` with a scan over all blocks but the first, of which each is `body`."""
    x, of_first, first = block(blocks.first, x, None, state and state.first)
    if blocks.rest is None:
        return x, Stacked(first, None)
    constant = jax.tree.map(lax.stop_gradient, of_first)

    def step(
        carry: tuple[Array, Any], of_block: tuple[BlockParams, BlockState | None]
    ) -> tuple[tuple[Array, Any], BlockState]:
        x, passed = carry
        p, s = of_block
        x, passed, after = body(p, x, jax.tree.map(_with_gradient, constant, passed), s)
        return (x, passed), after

    (x, _), rest = lax.scan(step, (x, of_first), (blocks.rest, state and state.rest))
    return x, Stacked(first, rest)


@jax.custom_vjp
def _with_gradient(constant: Array, carried: Array) -> Array:
    """`constant`, which equals `carried`, with the gradient of `carried`.

    A backward pass keeps a value that a scan carries once for each block, and a constant once.
    """
    return constant


_with_gradient.defvjp(lambda constant, carried: (constant, None), lambda _, dx: (None, dx))


def add(x: Array, dx: Array) -> Array:
    """The sum of the input and the output of a mixing.

    On a GPU the product that ends a mixing adds `x` itself, in the shape [tokens, C]. If `x` has
    another shape, the compiler overwrites it with the sum and makes a copy of `x` for its other
    uses before.
    """
    return _recomputation.save_under_mixes(_added(x, dx))


@jax.custom_jvp
def _added(x: Array, dx: Array) -> Array:
    def joined(x: Array, dx: Array) -> Array:
        return (x.reshape(-1, x.shape[-1]) + dx.reshape(-1, dx.shape[-1])).reshape(x.shape)

    # Rows and tokens that may be distributed are not joined to one axis.
    return in_program_of_one_device(joined, jnp.add, x, dx)


@_added.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _added(*primals), jnp.add(*tangents)
