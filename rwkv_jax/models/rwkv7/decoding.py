"""Decoding of text."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Key

from rwkv_jax.models import _decoding
from rwkv_jax.models._trees import Params
from rwkv_jax.models.rwkv7.model import GENERATION


def generate(
    params: Params,
    key: Key[Array, ""],
    prompt: Int[Array, "B T"],
    length: int,
    *,
    temperature: float = 1.0,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
) -> Int[Array, "B length"]:
    """`length` tokens that are sampled one after another to continue `prompt`.

    The prompt is read as a sequence; after it, decoding goes token by token.

    Args:
      params: the parameters.
      key: the random key of the samples.
      prompt: tokens, at least one in each row.
      length: how many tokens to sample.
      temperature: a number above 0 that logits are divided by. Lower ones favour likely tokens.
      dtype: the dtype of the activations.
      implementation: the implementation of `wkv7`.

    Returns:
      The sampled tokens [B, length], without the prompt.
    """
    forward = functools.partial(
        GENERATION.apply, params, dtype=dtype, implementation=implementation
    )
    return _decoding.generate(forward, key, prompt, length, temperature)
