"""The product of a few rows with a matrix, as decoding needs it.

On CPUs a kernel reads the matrix once, in the dtype in which it is stored, with all threads. XLA
makes a matrix of another dtype than float32 wide each time, and takes several times as long. Of a
matrix [inputs, outputs] the kernel reads only the inputs that are not zero in all rows. Everywhere
else the product is left to the compiler.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Num

from rwkv_jax._native import library
from rwkv_jax._operator.call import Options
from rwkv_jax._operator.dispatch import Computation, Pass, named, run_with_jvp
from rwkv_jax._operator.partition import Shards, partitioned

TARGET = "rwkv_row_product_v1"
library.register_export_targets(TARGET)

MAX_ROWS = {"float32": 16, "bfloat16": 32, "float16": 32, "int8": 32}
"""The largest number of rows that the kernel takes, by the dtype of the matrix: up to there it is
faster than XLA, as `scripts/bench_row_product.py` shows. These are the dtypes that it takes."""

LARGEST = 127
"""The largest integer of a quantised matrix. Every dtype of activations has it, exactly."""


class Operands(NamedTuple):
    """The operands of a product. On a mesh the first one says where the others go."""

    weight: Any
    x: Any
    scale: Any


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
    operands, of_rows = Operands(weight, x, scale), _RowProduct(by_output, jnp.dtype(dtype))
    return run_with_jvp(of_rows, "forward", Options(), operands)


def by_compiler(
    x: Array, weight: Array, scale: Array | None, dtype: DTypeLike, *, by_output: bool = True
) -> Array:
    """`product` without the kernel.

    The backward pass of a sequence makes a matrix of fewer bits than `x` wide again. To keep it
    from the forward pass would be a copy of all weights with the bits of the activations.
    """
    compute = functools.partial(_by_compiler, dtype=dtype, by_output=by_output)
    if x.ndim > 2 and weight.dtype.itemsize < x.dtype.itemsize:
        compute = jax.checkpoint(compute)
    return compute(x, weight, scale)


def _by_compiler(
    x: Array, weight: Array, scale: Array | None, *, dtype: DTypeLike, by_output: bool
) -> Array:
    letters = "...i,oi->...o" if by_output else "...i,io->...o"
    if scale is None:
        return jnp.einsum(letters, x, weight.astype(x.dtype), preferred_element_type=dtype)
    if x.ndim == 2:
        # Depends on the row, so that no loop over tokens starts by making the weights wide.
        weight, x = lax.optimization_barrier((weight, x))
        if scale.shape[1] == 1:
            y = jnp.einsum(letters, x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
            return (y * scale.reshape(1, -1)).astype(dtype)
    # Scaled results would need a product of float32 in the backward pass.
    matrix = wide(weight if by_output else weight.T, scale).astype(x.dtype)
    return jnp.einsum("...i,oi->...o", x, matrix, preferred_element_type=dtype)


def wide(
    weight: Num[Array, "outputs inputs"], scale: Float32[Array, "outputs groups"]
) -> Float32[Array, "outputs inputs"]:
    """The matrix that a quantised one stands for."""
    grouped = weight.reshape(*scale.shape, -1).astype(jnp.float32)
    return (grouped * scale[..., None]).reshape(weight.shape)


@dataclasses.dataclass(frozen=True)
class _RowProduct(Computation):
    """The product of `x` [b, i] with a matrix [o, i] or [i, o]. On a mesh the kernel multiplies by
    each device's part of the matrix, wherever that is. Where the inputs are distributed, the
    results are summed over devices, and groups of inputs are distributed with them."""

    by_output: bool
    dtype: np.dtype

    name = "row_product"
    implementations = ("ffi", "xla")
    kernels_on: ClassVar = "cpu"
    vmap: ClassVar = "formula"
    mesh: ClassVar = "none"  # the kernel has a rule of its own

    def axes(self, name: Pass, options: Options, operands: Operands) -> tuple[Operands, str]:
        scale = operands.scale
        if scale is not None:
            scale = "oi" if scale.shape[1] > 1 else "og"
        return Operands("oi" if self.by_output else "io", "bi", scale), "bo+i"

    def formula(self, name: Pass, options: Options, operands: Operands) -> Array:
        weight, x, scale = operands
        return by_compiler(x, weight, scale, self.dtype, by_output=self.by_output)

    def kernel(self, name: Pass, options: Options, operands: Operands) -> Array:
        axes, result = self.axes(name, options, operands)
        call = partitioned(self.name, self._local, named(axes), [result], sharded="bio")
        return call(*jax.tree.leaves(operands))[0].astype(self.dtype)

    def _local(self, shards: Shards, weight: Array, x: Array, *scale: Array) -> tuple[Array, ...]:
        outputs = weight.shape[0 if self.by_output else 1]
        own = scale[0] if scale else jnp.zeros((outputs, 0), jnp.float32)
        results = [((len(x), outputs), jnp.float32)]
        operands = x.astype(jnp.float32), weight, own
        return library.call(TARGET, results, *operands, by_output=int(self.by_output))
