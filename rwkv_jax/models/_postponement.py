"""Loops over tokens in which states are updated once for several tokens.

With many rows, a step of decoding takes most of its time to read and to write the states of the
operator. A state need not be written each time: with the factors G_t of the recurrence
S_t = S_{t-1} G_t + v_t k_t^T, what a token reads out after some others,

    y_t = S_t r_t = S G_1 ... G_t r_t + (what the tokens add),

takes a few products of vectors beside the product with S, the last state that was written. So the
vectors of a few tokens wait, and one step out of several brings the state up to date with all of
them, in the order and the arithmetic of a step at a time.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

Tree = TypeVar("Tree")

MOST_WAITING = 3
"""How many tokens wait at most."""


class Postponed(NamedTuple):
    """A state of an operator and the tokens with which it is not up to date.

    Attributes:
      state: the state that was written last.
      waiting: the vectors w, k, v, a and b of each token that waits, w as factors.
      schedule: how many tokens wait, and whether the next step updates the state; None between the
        steps, so that a loop does not carry it for each block.
    """

    state: Float32[Array, "B H V K"]
    waiting: Float32[Array, "N B H vectors K"]
    schedule: Int32[Array, "2"] | None = None


def postponed(model: Any, params: Any, state: Tree) -> Tree:
    """`state` for a loop over tokens, with no token that waits, or as it is where nothing would be
    gained: `Generation.postponed` says where that is.

    Args:
      model: the module of a model, or what stands for it.
      params: the parameters.
      state: the state of the model. Between this call and `settled`, only `apply` and `features`
        take it, each time for one token of each row, and after `at_step`.
    """
    if not isinstance(model, ModuleType):
        return state
    return model.GENERATION.postponed(params, state)


def at_step(state: Tree, step: Int32[Array, ""], last: Bool[Array, ""]) -> Tree:
    """The state for step number `step` of the loop, counted from 0, and whether it is the last."""
    waiting = step % (MOST_WAITING + 1)
    schedule = jnp.stack([waiting, (last | (waiting == MOST_WAITING)).astype(jnp.int32)])
    return _mapped(lambda x: x._replace(schedule=schedule), state)


def settled(state: Tree) -> Tree:
    """The state after the last step, as it is without postponement."""
    return _mapped(lambda x: x.state, state)


def _mapped(fn: Callable[[Postponed], Any], state: Tree) -> Tree:
    def mapped(x: Any) -> Any:
        return fn(x) if isinstance(x, Postponed) else x

    return jax.tree.map(mapped, state, is_leaf=lambda x: isinstance(x, Postponed))
