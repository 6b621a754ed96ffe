"""Loops over tokens in which states are updated once for several tokens.

With many rows, a step of decoding takes most of its time to read and to write the states of the
operator. A state need not be written each time: with the factors G_t of the recurrence
S_t = S_{t-1} G_t + v_t k_t^T, what a token reads out after some others,

    y_t = S_t r_t = S G_1 ... G_t r_t + (what the tokens add),

takes a few products of vectors beside the product with S, the last state that was written. So the
vectors of a few tokens wait, and one step out of several brings the state up to date with all of
them, in the order and the arithmetic of a step at a time.

A step between those that write a state reads it only for a product with a rounded r_t. For this it
need not read all bits, so the first step of a loop updates the states and leaves them in halves
(`Deferred`), of which the steps between updates read the upper ones: S is rounded as r_t is, and
only in what such a step reads out.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import BFloat16, Bool, Float32, Int32

Tree = TypeVar("Tree")

MAX_PENDING = 5
"""How many tokens wait at most."""


class Deferred(NamedTuple):
    """A state of an operator and the tokens with which it is not up to date.

    Attributes:
      state: the state that was written last. Kernels may leave other bits in its place: each number
        in halves of 16 bits, of which the upper one is the nearest bfloat16.
      waiting: the vectors w, k, v, a and b of each token that waits, w before it is a factor.
      schedule: how many tokens wait, whether the next step updates the state, whether an earlier
        one did, and whether a later one will; None between the steps, so that a loop does not carry
        it for each block. Between the first update and the last one a state may lie in halves.
    """

    state: Float32[Array, "B H V K"]
    waiting: BFloat16[Array, "B H N vectors K"]
    schedule: Int32[Array, "4"] | None = None


def deferred(model: Any, params: Any, state: Tree) -> Tree:
    """`state` for a loop over tokens, with no token that waits, or as it is where nothing would be
    gained: `Generation.deferred` says where that is.

    Args:
      model: the module of a model, or what stands for it.
      params: the parameters.
      state: the state of the model. Between this call and `flush`, only `apply` and `hidden_states`
        take it, each time for one token of each row, and after `at_step`.
    """
    if not isinstance(model, ModuleType):
        return state
    return model.GENERATION.deferred(params, state)


def at_step(state: Tree, step: Int32[Array, ""], last: Bool[Array, ""]) -> Tree:
    """The state for step number `step` of the loop, counted from 0, and whether it is the last."""
    waiting = jnp.where(step == 0, 0, (step - 1) % (MAX_PENDING + 1))
    updates = (step == 0) | (waiting == MAX_PENDING) | last
    schedule = [waiting, updates, step > 0, ~last]
    schedule = jnp.stack([x.astype(jnp.int32) for x in schedule])
    return _mapped(lambda x: x._replace(schedule=schedule), state)


def flush(state: Tree) -> Tree:
    """The state after the last step, as it is without deferral."""
    return _mapped(lambda x: x.state, state)


def _mapped(fn: Callable[[Deferred], Any], state: Tree) -> Tree:
    def mapped(x: Any) -> Any:
        return fn(x) if isinstance(x, Deferred) else x

    return jax.tree.map(mapped, state, is_leaf=lambda x: isinstance(x, Deferred))
