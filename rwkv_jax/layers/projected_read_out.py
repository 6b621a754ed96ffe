"""`read_out` and the output product in one, which keeps nothing between them."""

import dataclasses
import functools

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Float32

from rwkv_jax._operator import dispatch
from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _products
from rwkv_jax.layers._function import Operands, prepared
from rwkv_jax.layers._products import linear
from rwkv_jax.layers.read_out import FUNCTION

RESTORING = dataclasses.replace(FUNCTION, restored=("out",))
"""`read_out` with a backward pass that gives `out` as well, for the gradient of the matrix."""


def projected_read_out(
    y: Float[Operand, "B T H K"],
    bonus: Float32[Operand, "B T H"],
    v: Float[Operand, "B T H K"],
    gate: Float[Operand, "B T H K"],
    weight: Float32[Operand, "H K"],
    bias: Float32[Operand, "H K"],
    matrix: Float[Operand, "D C"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T D"]:
    """What `read_out` makes of the output `y` of `wkv7`, times the output matrix:

        out = read_out(y, bonus, v, gate, weight, bias)
        projected = matrix out

    where `out` has the channels of all heads side by side, C = H K. Results and gradients are those
    of the two functions. The backward pass needs nothing but the arguments: the kernel for the
    gradients of `read_out` writes `out` once more, for the gradient of the matrix, so that `out` is
    not kept.

    Args:
      y: the output of `wkv7`, float32, bfloat16 or float16.
      bonus: as `read_out` takes it.
      v: likewise.
      gate: likewise.
      weight: likewise.
      bias: likewise.
      matrix: the output matrix, of any of these dtypes. It is rounded to the dtype of `y`.
      implementation: of `read_out`: "ffi", "xla", "reference" or, for the fastest one, None. The
        product is left to the compiler.

    Returns:
      `projected`, in the dtype of `y`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.
    """
    op = "projected_read_out"
    tensors = {"y": y, "bonus": bonus, "v": v, "gate": gate}
    parameters = {"weight": weight, "bias": bias}
    options, inputs = prepared(op, FUNCTION, tensors, parameters, implementation)
    (matrix,) = _products.checked(op, {"matrix": "DC"}, {"matrix": matrix}, None)
    *_, heads, size = y.shape
    if matrix.shape[1] != heads * size:
        raise ValueError(
            f"{op}: matrix has shape {matrix.shape}, so C = {matrix.shape[1]}, where y has "
            f"H = {heads} and K = {size}; accepted is [D, C] with C = H K"
        )
    *placed, matrix = vary_alike(*inputs.values(), matrix.astype(y.dtype))
    inputs = dict(zip(inputs, placed, strict=True))
    if implementation == "reference":
        return _forward(options, inputs, matrix)[0]
    return _run(options, inputs, matrix)


def _product(out: Array, matrix: Array) -> Array:
    return linear(out.reshape(*out.shape[:2], matrix.shape[1]), matrix)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, inputs: Arrays, matrix: Array) -> Array:
    return _forward(options, inputs, matrix)[0]


def _forward(options: Options, inputs: Arrays, matrix: Array) -> tuple[Array, tuple[Arrays, Array]]:
    results, _ = dispatch.run(FUNCTION, "forward", options, Operands(inputs))
    out = checkpoint_name(results["out"], FUNCTION.name)
    return _product(out, matrix), (inputs, matrix)


def _backward(
    options: Options, residuals: tuple[Arrays, Array], cotangent: Array
) -> tuple[Arrays, Array]:
    inputs, matrix = residuals
    # `out` has the shape and the dtype of y.
    (dout,) = jax.linear_transpose(lambda out: _product(out, matrix), inputs["y"])(cotangent)
    operands = Operands(inputs, {}, {"out": dout})
    gradients = dict(dispatch.run(RESTORING, "backward", options, operands))
    out = gradients.pop("out")
    (dmatrix,) = jax.linear_transpose(lambda matrix: _product(out, matrix), matrix)(cotangent)
    return gradients, dmatrix


_run.defvjp(_forward, _backward)
