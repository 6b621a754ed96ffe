"""Decoding of text."""

import functools

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int, Key

from rwkv_jax.models import _decoding
from rwkv_jax.models._trees import Params
from rwkv_jax.models.rwkv6.model import GENERATION


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

    The arguments and results are those of `rwkv7.generate`, with `wkv6` for `wkv7`.
    """
    forward = functools.partial(
        GENERATION.apply, params, dtype=dtype, implementation=implementation
    )
    return _decoding.generate(forward, key, prompt, length, temperature)
