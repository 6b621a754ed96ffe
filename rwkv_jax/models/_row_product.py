"""The product of a few rows with a matrix, as decoding needs it.

On CPUs a kernel reads the matrix once, in the dtype in which it is stored, with all threads. XLA
makes a matrix of another dtype than float32 wide each time, and takes several times as long. Of a
matrix [inputs, outputs] the kernel reads only the inputs that are not zero in all rows. Everywhere
else the product is left to the compiler.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Num

from rwkv_jax._native import library
from rwkv_jax._operator.partition import axis_names

TARGET = "rwkv_row_product_v1"
library.declare(TARGET)

MAX_ROWS = {"float32": 16, "bfloat16": 32, "float16": 32, "int8": 32}
"""The largest number of rows that the kernel takes, by the dtype of the matrix: up to there it is
faster than XLA, as `scripts/bench_row_product.py` shows. These are the dtypes that it takes."""

LARGEST = 127
"""The largest integer of a quantised matrix. Every dtype of activations has it, exactly."""


def product(
    x: Float[Array, "*shape inputs"],
    weight: Num[Array, "..."],
    scale: Float32[Array, "outputs groups"] | None,
    dtype: DTypeLike,
    *,
    by_output: bool = True,
) -> Float[Array, "*shape outputs"]:
    """The product of rows with a matrix [outputs, inputs], or with one [inputs, outputs] if it is
    not `by_output`, with sums in float32, in `dtype`.

    `scale` has a factor for each group of inputs of an output. A matrix without it is rounded to
    the dtype of `x` where the compiler multiplies, and where the kernel does, it is not. The kernel
    takes zero times a weight as zero if it is not `by_output`, even where the weight is infinite or
    NaN.
    """
    compute = by_kernel if _takes(x, weight) else by_compiler
    return compute(x, weight, scale, dtype, by_output=by_output)


def _takes(x: Array, weight: Array) -> bool:
    """Whether the kernel takes a call, where it is lowered for a CPU."""
    # On an Explicit mesh, or inside a `shard_map`, the types of the operands have a mesh.
    whole = all(jax.typeof(a).sharding.mesh.empty for a in (x, weight))
    few = x.ndim == 2 and 0 < len(x) <= MAX_ROWS.get(str(weight.dtype), 0)
    return few and whole and library.why_not("cpu") is None


def by_kernel(
    x: Array, weight: Array, scale: Array | None, dtype: DTypeLike, *, by_output: bool = True
) -> Array:
    """`product` with the kernel where it is lowered for a CPU."""
    return _few_rows(by_output, jnp.dtype(dtype), x, weight, scale)


def by_compiler(
    x: Array, weight: Array, scale: Array | None, dtype: DTypeLike, *, by_output: bool = True
) -> Array:
    """`product` without the kernel."""
    letters = "...i,oi->...o" if by_output else "...i,io->...o"
    if scale is None:
        return jnp.einsum(letters, x, weight.astype(x.dtype), preferred_element_type=dtype)
    if x.ndim == 2:
        # Depends on the row, so that no loop over tokens starts by making the weights wide.
        weight, x = lax.optimization_barrier((weight, x))
    outputs, groups = scale.shape
    if groups == 1:
        y = jnp.einsum(letters, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
        return (y * scale.reshape((1,) * (y.ndim - 1) + (outputs,))).astype(dtype)
    matrix = wide(weight if by_output else weight.T, scale).astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)


def wide(
    weight: Num[Array, "outputs inputs"], scale: Float32[Array, "outputs groups"]
) -> Float32[Array, "outputs inputs"]:
    """The matrix that a quantised one stands for."""
    grouped = weight.reshape(*scale.shape, -1).astype(jnp.float32)
    return (grouped * scale[..., None]).reshape(weight.shape)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
@functools.partial(jax.jit, static_argnums=(0, 1))
def _few_rows(
    by_output: bool, dtype: np.dtype, x: Array, weight: Array, scale: Array | None
) -> Array:
    def exact(x: Array, weight: Array, scale: Array) -> Array:
        """The formula for a scale that may have no groups."""
        some = scale if scale.shape[1] else None
        return by_compiler(x, weight, some, dtype, by_output=by_output)

    def kernel(x: Array, weight: Array, scale: Array) -> Array:
        shape = len(x), weight.shape[0 if by_output else 1]
        (y,) = library.call(
            *(TARGET, [(shape, jnp.float32)]),
            *(x.astype(jnp.float32), weight, scale),
            by_output=int(by_output),
        )
        return y

    def on_cpu(*operands: Array) -> Array:
        return _partitioned(kernel, by_output)(*operands).astype(dtype)

    @custom_vmap
    def call(*operands: Array) -> Array:
        return lax.platform_dependent(*operands, cpu=on_cpu, default=exact)

    @call.def_vmap
    def _rule(size: int, mapped: Sequence[bool], *operands: Any):
        del size
        return jax.vmap(exact, [0 if m else None for m in mapped])(*operands), True

    if scale is None:
        scale = jnp.zeros((weight.shape[0 if by_output else 1], 0), jnp.float32)
    return call(x, weight, scale)


@_few_rows.defjvp
def _(by_output: bool, dtype: np.dtype, primals: Any, tangents: Any) -> tuple[Array, Array]:
    def formula(x: Array, weight: Array, scale: Array | None) -> Array:
        return by_compiler(x, weight, scale, dtype, by_output=by_output)

    return _few_rows(by_output, dtype, *primals), jax.jvp(formula, primals, tangents)[1]


def _partitioned(kernel: Callable[..., Array], by_output: bool) -> Callable[..., Array]:
    """`kernel` on each device's part of the matrix, wherever that is. Where the inputs are
    distributed, the results are summed over devices."""
    call = custom_partitioning(kernel)
    axes = ("o", "i") if by_output else ("i", "o")

    def partition(mesh: Any, operands: Any, results: Any):
        del results
        specs = [tuple(x.sharding.spec) + (None,) * 2 for x in operands]
        along = dict(zip(axes, specs[1], strict=False))
        taken = {name for names in along.values() for name in axis_names(names)}
        rows = None if taken & set(axis_names(specs[0][0])) else specs[0][0]
        groups = None
        if operands[2].shape[1] > 1:
            # Groups are distributed with their inputs, where they can be.
            devices = math.prod(mesh.shape[name] for name in axis_names(along["i"]))
            along["i"] = groups = None if operands[2].shape[1] % devices else along["i"]
        places = [
            P(rows, along["i"]),
            P(*(along[axis] for axis in axes)),
            P(along["o"], groups),
            P(rows, along["o"]),
        ]

        def local(*operands: Array) -> Array:
            y = kernel(*operands)
            return lax.psum(y, axis_names(along["i"])) if along["i"] else y

        *of_operands, of_result = (NamedSharding(mesh, place) for place in places)
        return mesh, local, of_result, tuple(of_operands)

    call.def_partition(
        partition=partition,
        sharding_rule=SdyShardingRule(
            (ArrayMapping("b", "i"), ArrayMapping(*axes), ArrayMapping("o", "g")),
            (ArrayMapping("b", "o"),),
            reduction_factors=("i",),
            need_replication_factors=("g",),
        ),
    )
    return call
