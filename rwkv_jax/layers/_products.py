"""What layer functions share that are made of matrix products, with kernels for GPUs of compute
capability 9.0 alone."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from rwkv_jax._native import gpus
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Options
from rwkv_jax._operator.dispatch import Computation, Pass

PRODUCT = "product"
"""The name of the results of matrix products for `jax.checkpoint_policies`."""

MAX_TOKENS = 2**24
"""The largest number of tokens that the kernels take."""


class Products(Computation):
    """Products with kernels, to which they are left where `is_chosen` says so. Elsewhere they are a
    formula that JAX differentiates."""

    vmap, mesh = "in turn", "kernels"

    def why_not(
        self, name: Pass, choice: str, options: Options, platform: str, operands: Any
    ) -> str | None:
        reason = super().why_not(name, choice, options, platform, operands)
        return reason or (gpus.why_not_hopper() if choice == "ffi" else None)

    def is_chosen(self, options: Options, operands: Any) -> bool:
        """Whether the kernels may compute a call: on the GPUs that the program is for, if it is
        lowered for them."""
        if options.implementation is not None:
            return options.implementation == "ffi"
        return self.why_not("forward", "ffi", options, "cuda", operands) is None


def checked(
    op: str, axes: Mapping[str, str], given: Mapping[str, Any], implementation: str | None
) -> list[Array]:
    """The arguments of `op`, which need not share a dtype, as arrays.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype, or there is no such
        implementation.
    """
    if implementation is not None:
        check.choice(op, "implementation", implementation, Products.implementations)
    for name, array in given.items():
        check.array(op, name, array)
        check.dtype(op, name, array)
    check.share_sizes(op, axes, given)
    return [jnp.asarray(array) for array in given.values()]


def linear(x: Array, matrix: Array) -> Array:
    """The product of rows with a matrix [outputs, inputs], in the dtype of `x`, with sums in
    float32."""
    matrix = matrix.astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=x.dtype)


def by_input(x: Array, matrix: Array) -> Array:
    """As `linear`, with a matrix [inputs, outputs]."""
    matrix = matrix.astype(x.dtype)
    return jnp.einsum("...i,io->...o", x, matrix, preferred_element_type=x.dtype)


def why_not_dtype(x: Any) -> str | None:
    """Why kernels do not take the dtype of `x`, or None."""
    return None if x.dtype == jnp.bfloat16 else f"x is {x.dtype}; the cuda kernels take bfloat16"


def why_not_tokens(
    implementation: str | None, x: Any, min_tokens: int, max_tokens: int = MAX_TOKENS
) -> str | None:
    """Why kernels do not take the tokens of `x` [B, T, ...], or None. There are `min_tokens` to
    `max_tokens`, unless `implementation` names the kernels."""
    rows, tokens = x.shape[:2]
    least, most = (0, MAX_TOKENS) if implementation == "ffi" else (min_tokens, max_tokens)
    if least <= rows * tokens <= most:
        return None
    accepted = f"from {least} to {most} tokens"
    return f"B = {rows} and T = {tokens}; the cuda kernels take {accepted}"


def why_not_size(
    name: str, size: int, multiple: int, most: int, least: int | None = None
) -> str | None:
    """Why kernels do not take an axis of this size, or None."""
    if (least or multiple) <= size <= most and size % multiple == 0:
        return None
    limits = f"from {least} to {most}" if least else f"up to {most}"
    return f"{name} {size}; the cuda kernels take multiples of {multiple} {limits}"
