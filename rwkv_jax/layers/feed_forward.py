"""The network of a channel mixing: two products with a squared ReLU between them.

The library of products on a GPU cannot apply the squared ReLU or its derivative to a result while
it has it in registers. The kernels compute a product with it, one in each pass. The other products
are left to the compiler.
"""

import functools
from dataclasses import dataclass
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from rwkv_jax._native import library
from rwkv_jax._operator.call import Leaf, Options
from rwkv_jax._operator.dispatch import Pass, run_with_jvp
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _products
from rwkv_jax.layers._products import PRODUCT, Products, Size, linear
from rwkv_jax.layers.relu_squared import gradient, relu_squared

AXES = {"x": "BTC", "key": "FC", "value": "CF"}

MIN_WIDTH, WIDTH_MULTIPLE, HIDDEN_MULTIPLE = 512, 64, 256
MAX_WIDTH = 2**18

MIN_TOKENS = 4096
"""From so many tokens on, None takes the kernels."""

WIDE, MIN_TOKENS_OF_WIDE = 8192, 1024
"""The forward kernel is taken from fewer tokens on where the hidden layer has so many channels."""

TARGETS = {"forward": "rwkv_feed_forward_fwd_v1", "backward": "rwkv_feed_forward_bwd_v2"}
library.register_export_targets(*TARGETS.values())


def feed_forward(
    x: Float[Operand, "B T C"],
    key: Float[Operand, "F C"],
    value: Float[Operand, "C F"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T C"]:
    """The squared-ReLU network of the channel mixing of RWKV-4 to 7, for each token:

        y = value max(key x, 0)^2

    with sums in float32. The backward pass needs nothing but `x`, the weights and
    max(key x, 0)^2.

    Args:
      x: tokens, float32, bfloat16 or float16.
      key: the first matrix, of any of these dtypes. It is rounded to the dtype of `x`.
      value: the second matrix, likewise.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None. "ffi" takes bfloat16
        on GPUs of compute capability 9.0, C a multiple of 64 from 512 on, and F a multiple of 256;
        None takes it there from 4096 tokens on, and forward from 1024 on if F is 8192 or more. The
        other two are the same formula. A program with "ffi" runs on no other GPU.

    Returns:
      y, in the dtype of `x`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formula is that of RWKV-LM's training code, `RWKV_CMix_x070`.
    """
    op, given = "feed_forward", {"x": x, "key": key, "value": value}
    x, key, value = _products.checked(op, AXES, given, implementation)
    options = Options(implementation=implementation)
    if _PRODUCTS.is_chosen(options, Operands(x, key.astype(x.dtype))):
        return _run(options, *vary_alike(x, key, value))
    hidden = relu_squared(checkpoint_name(linear(x, key), PRODUCT))
    return linear(hidden, value)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(options: Options, x: Array, key: Array, value: Array) -> Array:
    return _forward(options, x, key, value)[0]


def _forward(
    options: Options, x: Array, key: Array, value: Array
) -> tuple[Array, tuple[Array, ...]]:
    hidden = run_with_jvp(_PRODUCTS, "forward", options, Operands(x, key.astype(x.dtype)))
    hidden = checkpoint_name(hidden, PRODUCT)
    return linear(hidden, value), (x, key, value, hidden)


def _backward(options: Options, kept: tuple[Array, ...], dy: Array) -> tuple[Array, ...]:
    x, key, value, hidden = kept
    operands = Operands(dy, value.astype(dy.dtype), hidden)
    dhidden = run_with_jvp(_PRODUCTS, "backward", options, operands)
    (dvalue,) = jax.linear_transpose(lambda value: linear(hidden, value), value)(dy)
    (dkey,) = jax.linear_transpose(lambda key: linear(x, key), key)(dhidden)
    (dx,) = jax.linear_transpose(lambda x: linear(x, key), x)(dhidden)
    return dx, dkey, dvalue


_run.defvjp(_forward, _backward)


# The products with kernels.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The operands of a product with a kernel: forward `x` and `key`, backward `dy`, `value`, and
    max(key x, 0)^2. The first operand says where the rows are on a mesh."""

    rows: Leaf
    weight: Leaf
    hidden: Leaf | None = None


class _FeedForward(Products):
    """Channels of a mesh that distributes them are gathered (D), those of the hidden layer are not
    (H)."""

    name = "feed_forward"

    def axes(
        self, name: Pass, options: Options, operands: Operands[Any]
    ) -> tuple[Operands[str], str]:
        if name == "backward":
            return Operands("BTD", "DH", "BTH"), "BTH"
        return Operands("BTD", "HD"), "BTH"

    def why_no_kernel(self, name: Pass, options: Options, operands: Operands[Any]) -> str | None:
        width, forward = operands.rows.shape[-1], operands.hidden is None
        hidden = operands.weight.shape[0 if forward else 1]
        least = MIN_TOKENS_OF_WIDE if forward and hidden >= WIDE else MIN_TOKENS
        of_width = Size("C =", width, WIDTH_MULTIPLE, MAX_WIDTH, MIN_WIDTH)
        of_hidden = Size("F =", hidden, HIDDEN_MULTIPLE, MAX_WIDTH)
        return _products.why_not(options, operands.rows, (of_width, of_hidden), least)

    def formula(self, name: Pass, options: Options, operands: Operands[Array]) -> Array:
        """The forward product with its squared ReLU, or the backward one times the derivative."""
        rows, weight, hidden = operands.rows, operands.weight, operands.hidden
        if hidden is None:
            return jnp.square(jax.nn.relu(linear(rows, weight)))
        return gradient(hidden, linear(rows, weight.T))

    def kernel(self, name: Pass, options: Options, operands: Operands[Array]) -> Array:
        """The product on one device, whose part of the hidden layer may have any size."""
        rows, weight, forward = operands.rows, operands.weight, operands.hidden is None
        size, width = weight.shape if forward else weight.shape[::-1]
        if size % HIDDEN_MULTIPLE:
            return self.formula(name, options, operands)
        results = [((*rows.shape[:2], size), rows.dtype)]
        if not forward:  # room for the transpose of `value`
            results.append(((size, width), rows.dtype))
        target = TARGETS["forward" if forward else "backward"]
        return library.call(target, results, *jax.tree.leaves(operands))[0]


_PRODUCTS = _FeedForward()
