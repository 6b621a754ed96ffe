"""What layer functions share that are made of matrix products, with kernels for GPUs of compute
capability 9.0 alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from rwkv_jax._native import gpus, library
from rwkv_jax._operator import check

PRODUCT = "product"
"""The name of the results of matrix products for `jax.checkpoint_policies`."""

MAX_TOKENS = 2**24
"""The largest number of tokens that the kernels take."""

IMPLEMENTATIONS = ("ffi", "xla", "reference")


def checked(
    op: str, axes: Mapping[str, str], given: Mapping[str, Any], implementation: str | None
) -> list[Array]:
    """The arguments of `op`, which need not share a dtype, as arrays.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype, or there is no such
        implementation.
    """
    if implementation is not None:
        check.choice(op, "implementation", implementation, IMPLEMENTATIONS)
    for name, array in given.items():
        check.array(op, name, array)
        if array.dtype not in check.DTYPES:
            accepted = ", ".join(check.DTYPES)
            raise TypeError(f"{op}: {name} is {array.dtype}; accepted are {accepted}")
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


def why_not(
    implementation: str | None, x: Any, min_tokens: int, max_tokens: int = MAX_TOKENS
) -> str | None:
    """Why no kernels take the tokens of `x` [B, T, ...] on the GPUs that programs are for, or None.
    There are `min_tokens` to `max_tokens`, unless `implementation` names the kernels."""
    rows, tokens = x.shape[:2]
    least, most = (0, MAX_TOKENS) if implementation == "ffi" else (min_tokens, max_tokens)
    if not least <= rows * tokens <= most:
        accepted = f"from {least} to {most} tokens"
        return f"B = {rows} and T = {tokens}; the cuda kernels take {accepted}"
    return library.why_not("cuda") or gpus.other_than_hopper()


def in_turn(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` of arrays. Of several at once `vmap` computes each in turn."""
    batched = custom_vmap(call)

    @batched.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Any) -> tuple[Any, Any]:
        def one(own: Sequence[Array]) -> Any:
            of_one = iter(own)
            return in_turn(call)(
                *(next(of_one) if m else x for x, m in zip(operands, mapped, strict=True))
            )

        results = lax.map(one, [x for x, m in zip(operands, mapped, strict=True) if m])
        return results, jax.tree.map(lambda _: True, results)

    return batched
