"""`read_out` and the output product in one, which keeps nothing between them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

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

OP = "projected_read_out"

OfOutput: TypeAlias = Callable[[Any, Float[Array, "B T C"]], Any]
"""A function of a tree of weights and the output of `read_out`. Its results, a tree of arrays, are
linear in that output."""


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
    (matrix,) = _products.checked(OP, {"matrix": "DC"}, {"matrix": matrix}, None)
    operands = y, bonus, v, gate, weight, bias
    return of_read_out(_product, matrix, *operands, implementation=implementation)


def of_read_out(
    function: OfOutput, weights: Any, *operands: Operand, implementation: str | None = None
) -> Any:
    """`function(weights, out)` with the operands of `read_out`, of which `projected_read_out` is
    the case of one matrix. A function that is the same object is traced once."""
    tensors: dict[str, Any] = dict(zip(("y", "bonus", "v", "gate"), operands[:4], strict=True))
    parameters: dict[str, Any] = dict(zip(("weight", "bias"), operands[4:], strict=True))
    options, inputs = prepared(OP, FUNCTION, tensors, parameters, implementation)
    leaves, structure = jax.tree.flatten((inputs, weights))
    inputs, weights = jax.tree.unflatten(structure, vary_alike(*leaves))
    if implementation == "reference":
        return _forward(function, options, inputs, weights)[0]
    return _run(function, options, inputs, weights)


def _product(matrix: Array, out: Array) -> Array:
    if matrix.shape[1] != out.shape[2]:
        raise ValueError(
            f"{OP}: matrix has shape {matrix.shape}, so C = {matrix.shape[1]}, where "
            f"the heads of y have {out.shape[2]} channels together; accepted is [D, C] with C = H K"
        )
    return linear(out, matrix)


def _of_heads(function: OfOutput, weights: Any, out: Float[Array, "B T H K"]) -> Any:
    rows, tokens, heads, size = out.shape
    return function(weights, out.reshape(rows, tokens, heads * size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(function: OfOutput, options: Options, inputs: Arrays, weights: Any) -> Any:
    return _forward(function, options, inputs, weights)[0]


def _forward(
    function: OfOutput, options: Options, inputs: Arrays, weights: Any
) -> tuple[Any, tuple[Arrays, Any]]:
    results, _ = dispatch.run(FUNCTION, "forward", options, Operands(inputs))
    out = checkpoint_name(results["out"], FUNCTION.name)
    return _of_heads(function, weights, out), (inputs, weights)


def _backward(
    function: OfOutput, options: Options, residuals: tuple[Arrays, Any], cotangents: Any
) -> tuple[Arrays, Any]:
    inputs, weights = residuals
    of_out = functools.partial(_of_heads, function, weights)
    # `out` has the shape and the dtype of y.
    (dout,) = jax.linear_transpose(of_out, inputs["y"])(cotangents)
    operands = Operands(inputs, {}, {"out": dout})
    gradients = dict(dispatch.run(RESTORING, "backward", options, operands))
    out = gradients.pop("out")
    _, pullback = jax.vjp(lambda weights: _of_heads(function, weights, out), weights)
    return gradients, *pullback(cotangents)


_run.defvjp(_forward, _backward)
