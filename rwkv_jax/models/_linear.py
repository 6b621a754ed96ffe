"""Linear maps without bias: within layers, as the embedding and as the output head."""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax import layers as functions
from rwkv_jax.layers.low_rank import ACTIVATIONS
from rwkv_jax.layers.projected_read_out import of_read_out
from rwkv_jax.models import _mesh, _recomputation, _row_product


class Weight(NamedTuple):
    """The weight of a linear map, [outputs, inputs], or of an embedding, [vocabulary, C].

    A quantised weight is int8, and `scale` float32 [outputs, groups]: the factor of each group of
    consecutive inputs of an output. `scale` is None for all other weights.
    """

    weight: Array
    scale: Array | None = None

    def wide(self) -> Array:
        """The matrix that the weight stands for: float32, if it is quantised."""
        return self.weight if self.scale is None else _row_product.wide(self.weight, self.scale)


class WeightByInput(NamedTuple):
    """The weight of a linear map, [inputs, outputs]: the numbers of an input lie side by side, so
    that the numbers of an input that is zero need not be read. `scale` is that of a `Weight`."""

    by_input: Array
    scale: Array | None = None

    def wide(self) -> Array:
        """The matrix [outputs, inputs] that the weight stands for."""
        return Weight(jnp.matrix_transpose(self.by_input), self.scale).wide()


class Table(NamedTuple):
    """What a block looks up by token, [vocabulary, numbers]: the weight of no linear map."""

    weight: Array


class Dropout(NamedTuple):
    """What a low-rank part leaves out of its input: each number with the probability `rate`, by a
    random key."""

    key: Array
    rate: Array

    def of(self, x: Array) -> Array:
        """`x` with zeros in the place of what is left out, and the rest divided by 1 - rate."""
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate).astype(x.dtype), jnp.zeros_like(x))


class Adapted(NamedTuple):
    """A weight W with a low-rank part beside it: the weight of the linear map W + B A, which is
    never made as a matrix. `lora_A` is A [rank, inputs], and `lora_B` is B [outputs, rank] with its
    factor. With `gain`, float32 [outputs], each output is multiplied by it, as in DoRA."""

    base: Weight | WeightByInput
    lora_A: Array
    lora_B: Array
    dropout: Dropout | None = None
    gain: Array | None = None


AnyWeight: TypeAlias = Weight | WeightByInput | Adapted


def is_plain(params: AnyWeight) -> TypeGuard[Weight]:
    """Whether a weight is one matrix [outputs, inputs] of floats, which is what functions take that
    compute more than a product."""
    return isinstance(params, Weight) and params.scale is None


def _product(x: Array, matrix: Array, scale: Array | None, dtype: Any, **options: bool) -> Array:
    """The product of rows, whose number an exported program need not know."""
    known = isinstance(x.shape[0], int)
    product = _row_product.product if known else _row_product.by_compiler
    return product(x, matrix, scale, dtype, **options)


def linear(params: AnyWeight, x: Float[Array, "*shape inputs"]) -> Float[Array, "*shape outputs"]:
    """The linear map in the dtype of `x`, with any weight."""
    if isinstance(params, Adapted):
        # Makes one step of the backward pass of both gradients. Otherwise the compiler may compute
        # the matrices' long after the tokens', and keep what it needs of many blocks until then.
        x, first = lax.optimization_barrier((x, params.lora_A))
        params = params._replace(lora_A=first)
    return _with_low_rank(params, _of_inputs(params, x))


def _of_inputs(params: AnyWeight, x: Array) -> tuple[Array, ...]:
    """The products of `x` in a linear map: W x, and A x if there is a low-rank part. With a gain
    and dropout, `x` is what is left of it, and the product of W with the rest is the third."""
    if not isinstance(params, Adapted):
        by_output = isinstance(params, Weight)
        matrix = params.weight if by_output else params.by_input
        return (_product(x, matrix, params.scale, x.dtype, by_output=by_output),)
    inputs = x if params.dropout is None else params.dropout.of(x)
    # On a GPU XLA makes one product of two with the same operand. It would copy W beside A for
    # that, and in the backward pass W beside B.
    inputs = lax.optimization_barrier(inputs)
    apart = params.gain is not None and params.dropout is not None
    parts = (inputs, x - inputs) if apart else (x,)
    first, *rest = (_of_inputs(params.base, part)[0] for part in parts)
    return first, *_of_inputs(Weight(params.lora_A), inputs), *rest


def _with_low_rank(params: AnyWeight, products: tuple[Array, ...]) -> Array:
    """The linear map from what `_of_inputs` gives."""
    y, *others = products
    if not isinstance(params, Adapted):
        return _recomputation.product(y)
    hidden, *rest = others
    both = _recomputation.product(hidden), params.lora_B
    hidden, second = lax.optimization_barrier(both)
    (low,) = _of_inputs(Weight(second), hidden)
    y = _recomputation.product(y + lax.optimization_barrier(low))
    if params.gain is None:
        return y
    # One step of the backward pass, as in `linear`.
    y, gain = lax.optimization_barrier((y, params.gain))
    scaled = y.astype(gain.dtype) * gain.reshape((1,) * (y.ndim - 1) + gain.shape)
    return sum(map(_recomputation.product, rest), start=scaled.astype(y.dtype))


def projected_read_out(
    params: AnyWeight, of_heads: Sequence[Array], layers: str | None
) -> Float[Array, "B T C"]:
    """The linear map of `read_out(*of_heads)` for sequences, which keeps nothing between the two.
    `layers` is that of the model."""
    products = of_read_out(_of_inputs, params, *of_heads, implementation=layers)
    return _with_low_rank(params, products)


def low_rank(
    first: Float[Array, "inputs rank"],
    second: Float[Array, "rank outputs"],
    x: Float[Array, "*shape inputs"],
    layers: str | None,
    activation: str = "identity",
    offset: Float[Array, "... outputs"] | None = None,
) -> Float[Array, "*shape outputs"]:
    """activation(x first) second + offset, with an offset that has the number of axes of `x`.
    `layers` is that of the model, where "ffi" leaves the choice open, because there are kernels for
    some GPUs and some sizes alone."""
    if x.ndim == 3:
        chosen = None if layers == "ffi" else layers
        vector = None if offset is None else offset.reshape(-1)
        return _recomputation.save_under_mixes(
            functions.low_rank(
                x, first, second, vector, activation=activation, implementation=chosen
            )
        )

    def times(x: Array, matrix: Array) -> Array:
        return _product(x, matrix, None, x.dtype, by_output=False)

    y = times(ACTIVATIONS[activation](times(x, first)), second)
    return y if offset is None else y + offset


def low_rank_maps(
    maps: Sequence[functions.LowRankMap], layers: str | None
) -> list[Float[Array, "*shape outputs"]]:
    """As `low_rank`, for several maps of the same tokens."""
    if maps[0].x.ndim == 3:
        chosen = None if layers == "ffi" else layers
        maps = [m if m.offset is None else m._replace(offset=m.offset.reshape(-1)) for m in maps]
        found = functions.low_rank_maps(maps, implementation=chosen)
        return [_recomputation.save_under_mixes(y) for y in found]

    def alone(m: functions.LowRankMap) -> Array:
        x, first, second = jnp.asarray(m.x), jnp.asarray(m.first), jnp.asarray(m.second)
        offset = None if m.offset is None else jnp.asarray(m.offset)
        return low_rank(first, second, x, layers, m.activation, offset)

    return [alone(m) for m in maps]


def embed(
    params: Weight | Table, tokens: Int[Array, "*shape"], dtype: DTypeLike
) -> Float[Array, "*shape C"]:
    """The embedding of each token in `dtype`, or what a table has for it."""
    return _rows(params.weight, tokens).astype(dtype)


@jax.custom_jvp
def _rows(
    table: Float[Array, "vocabulary C"], tokens: Int[Array, "*shape"]
) -> Float[Array, "*shape C"]:
    """The rows of a table. On a CPU, XLA makes all of a table of 16-bit floats wide before it takes
    rows, but not of a table of integers."""
    if table.dtype.itemsize != 2:
        return table[tokens]
    # Depends on the tokens, so that no loop over tokens starts with a copy of the table.
    table, tokens = lax.optimization_barrier((table, tokens))
    bits = lax.bitcast_convert_type(table, jnp.uint16)
    return lax.bitcast_convert_type(bits[tokens], table.dtype)


@_rows.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Any]) -> tuple[Array, Array]:
    table, tokens = primals
    return _rows(table, tokens), tangents[0][tokens]


def logits(params: Weight, x: Float[Array, "*shape C"]) -> Float32[Array, "*shape vocabulary"]:
    """The output head: multiplied in the dtype of `x`, with sums and results in float32."""

    def compute(x: Array, params: Weight) -> Array:
        return _product(x, params.weight, params.scale, jnp.float32)

    return _mesh.partitioned(
        compute, x, params, results=lambda: _mesh.spec_of_product(x, params.weight)
    )
