"""Decoding: sampling tokens one at a time from any model."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
from jax import Array, lax
from jaxtyping import Float32, Int, Key

State = TypeVar("State")
Forward: TypeAlias = Callable[[Array, State | None], tuple[Array, State]]
"""A model with its parameters: tokens and a state give logits and the next state."""


def generate(
    forward: Forward[State],
    key: Key[Array, ""],
    prompt: Int[Array, "B T"],
    length: int,
    temperature: float,
) -> Int[Array, "B length"]:
    """`length` tokens that are sampled one after another, after `prompt` is read as a sequence."""
    logits, state = forward(prompt, None)

    def step(
        carry: tuple[Float32[Array, "B vocabulary"], State], key: Key[Array, ""]
    ) -> tuple[tuple[Float32[Array, "B vocabulary"], State], Int[Array, " B"]]:
        logits, state = carry
        tokens = jax.random.categorical(key, logits / temperature)
        return forward(tokens, state), tokens

    _, tokens = lax.scan(step, (logits[:, -1], state), jax.random.split(key, length))
    return tokens.T
