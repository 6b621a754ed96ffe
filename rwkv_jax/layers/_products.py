"""What layer functions share that are made of matrix products, with kernels for GPUs of compute
capability 9.0 alone."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from rwkv_jax._native import gpus
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Options
from rwkv_jax._operator.dispatch import Computation, Pass
from rwkv_jax._operator.partition import SHARDED

PRODUCT = "product"
"""The name of the results of matrix products for `jax.checkpoint_policies`."""

MAX_TOKENS = 2**24
"""The largest number of tokens that the kernels take."""


class Products(Computation):
    """Products with kernels, to which they are left where `is_chosen` says so. Elsewhere they are a
    formula that JAX differentiates."""

    vmap, mesh, sharded = "in turn", "kernels", SHARDED + "T"

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
    """The checked arguments of `op`, which need not share a dtype, as arrays."""
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


class Size(NamedTuple):
    """A size that kernels limit: what messages call it, the size itself, what it is a multiple of,
    and the most and, if not one multiple, the least."""

    name: str
    size: int
    multiple: int
    most: int
    least: int | None = None


def why_not(
    options: Options, x: Any, sizes: Iterable[Size], min_tokens: int, max_tokens: int = MAX_TOKENS
) -> str | None:
    """Why kernels do not take rows `x` [B, T, ...] and these sizes, or None. There are `min_tokens`
    to `max_tokens`, unless the implementation is named."""
    if x.dtype != jnp.bfloat16:
        return f"x is {x.dtype}; the cuda kernels take bfloat16"
    for name, size, multiple, most, least in sizes:
        if size % multiple or not (least or multiple) <= size <= most:
            limits = f"from {least} to {most}" if least else f"up to {most}"
            return f"{name} {size}; the cuda kernels take multiples of {multiple} {limits}"
    rows, tokens = x.shape[:2]
    if reason := check.symbolic({"B": rows, "T": tokens}, "BT"):
        return f"{reason}; the cuda kernels have grids of numbers"
    least, most = (0, MAX_TOKENS) if options.implementation == "ffi" else (min_tokens, max_tokens)
    if least <= rows * tokens <= most:
        return None
    return f"B = {rows} and T = {tokens}; the cuda kernels take from {least} to {most} tokens"
