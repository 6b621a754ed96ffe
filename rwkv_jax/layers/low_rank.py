"""A low-rank map: two products with an activation between them.

The hidden layer of so few channels is cheap, and the time of the map is that of reading `x` and
writing y. A kernel computes both products, in each pass. The gradients of the matrices are left to
the compiler.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from rwkv_jax._native import library
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Leaf, Options
from rwkv_jax._operator.dispatch import Pass, run_with_jvp
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _products
from rwkv_jax.layers._products import PRODUCT, Products, Size, by_input

AXES = {"x": "BTC", "first": "CR", "second": "RD", "offset": "D"}

WIDTH_MULTIPLE, MAX_WIDTH = 128, 2**18
RANK_MULTIPLE, MAX_RANK = 8, 256
MIN_TOKENS = 12288
"""From so many tokens on, None takes the kernels. A block has 128 tokens, and with fewer blocks too
many multiprocessors have nothing to do."""

OFFSET_COLUMNS = 8
"""The columns of ones that an offset adds to the hidden layer."""

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda x: x,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}

SLOPES: dict[str, Callable[[Array], Array]] = {
    "identity": jnp.ones_like,
    "tanh": lambda y: 1 - y * y,
    "sigmoid": lambda y: y - y * y,
}
"""The derivatives, from the results of the activations."""

TARGETS = {
    (name, direction): f"rwkv_low_rank_{name}_{short}_v1"
    for name in ACTIVATIONS
    for direction, short in (("forward", "fwd"), ("backward", "bwd"))
}
library.register_export_targets(*TARGETS.values())


def low_rank(
    x: Float[Operand, "B T C"],
    first: Float[Operand, "C R"],
    second: Float[Operand, "R D"],
    offset: Float[Operand, " D"] | None = None,
    *,
    activation: str = "identity",
    implementation: str | None = None,
) -> Float[Array, "B T D"]:
    """A low-rank map, as RWKV-6 and 7 have it for decays, rates and gates, for each token:

        y = activation(x first) second + offset

    with sums in float32. The result of the activation is rounded to the dtype of `x`. The backward
    pass needs nothing but `x`, the matrices and that result.

    Args:
      x: tokens, float32, bfloat16 or float16.
      first: the first matrix, of any of these dtypes. It is rounded to the dtype of `x`.
      second: the second matrix, likewise.
      offset: what is added to each token, likewise.
      activation: "identity", "tanh" or "sigmoid".
      implementation: "ffi", "xla", "reference" or, for the fastest one, None. "ffi" takes bfloat16
        on GPUs of compute capability 9.0, C = D a multiple of 128, and R a multiple of 8 up to 256;
        None takes it there from 12288 tokens on. The other two are the same formula. A program
        with "ffi" runs on no other GPU.

    Returns:
      y, in the dtype of `x`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formula is that of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    op, given = "low_rank", {"x": x, "first": first, "second": second, "offset": offset}
    check.choice(op, "activation", activation, ACTIVATIONS)
    arrays = {name: array for name, array in given.items() if array is not None}
    x, *parameters = _products.checked(op, AXES, arrays, implementation)
    options, map_ = Options(implementation=implementation), _LowRank(activation)
    if map_.is_chosen(options, Operands(x, parameters[0], parameters[1])):
        return _run(map_, options, *vary_alike(x, *parameters))
    hidden = checkpoint_name(by_input(x, parameters[0]), PRODUCT)
    return _second(ACTIVATIONS[activation](hidden), *parameters[1:])[0]


def _second(hidden: Array, second: Array, offset: Array | None = None) -> tuple[Array, Array]:
    """The second product, and `hidden` with columns of ones for an offset: an offset within the
    product saves a pass over its results, and one over their gradients."""
    if offset is not None:
        # Products are slow with a rank that is no multiple of 8.
        more = 8 - hidden.shape[-1] % 8
        hidden = jnp.pad(hidden, ((0, 0), (0, 0), (0, more)), constant_values=1)
    return by_input(hidden, _rows(hidden, second, offset)), hidden


def _rows(hidden: Array, second: Array, offset: Array | None) -> Array:
    """The matrix for `hidden`: with the offset as the first row after those of `second`."""
    second = second.astype(hidden.dtype)
    if offset is None:
        return second
    rows = jnp.concatenate([second, offset.astype(hidden.dtype)[None]])
    return jnp.pad(rows, ((0, hidden.shape[-1] - len(rows)), (0, 0)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(map_: "_LowRank", options: Options, x: Array, *parameters: Array) -> Array:
    return _forward(map_, options, x, *parameters)[0]


def _forward(
    map_: "_LowRank", options: Options, x: Array, *parameters: Array
) -> tuple[Array, tuple[Array, ...]]:
    operands = Operands(x, *(p.astype(x.dtype) for p in parameters))
    y, hidden = run_with_jvp(map_, "forward", options, operands)
    return y, (checkpoint_name(hidden, PRODUCT), x, *parameters)


def _backward(
    map_: "_LowRank", options: Options, kept: tuple[Array, ...], dy: Array
) -> tuple[Array, ...]:
    hidden, x, first, *others = kept
    matrices = (matrix.astype(dy.dtype) for matrix in (first, others[0]))
    operands = Operands(dy, *matrices, hidden=hidden)
    dx, dhidden = run_with_jvp(map_, "backward", options, operands)
    (dfirst,) = jax.linear_transpose(lambda first: by_input(x, first), first)(dhidden)

    def of_others(second: Array, offset: Array | None = None) -> Array:
        return by_input(hidden, _rows(hidden, second, offset))

    return dx, dfirst, *jax.linear_transpose(of_others, *others)(dy)


_run.defvjp(_forward, _backward)


# The kernels.


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands(Generic[Leaf]):
    """The operands of a kernel, with `x` or dy as rows. `offset` is for the forward pass, and
    `hidden`, the result of the activation, for the backward pass."""

    rows: Leaf
    first: Leaf
    second: Leaf
    offset: Leaf | None = None
    hidden: Leaf | None = None


@dataclass(frozen=True)
class _LowRank(Products):
    """Channels of a mesh that distributes them are gathered (D). What the passes keep of the hidden
    layer has more columns (E) than its rank (R), if there is an offset."""

    activation: str
    name = "low_rank"

    def axes(
        self, name: Pass, options: Options, operands: Operands[Any]
    ) -> tuple[Operands[str], tuple[str, str]]:
        if name == "backward":
            return Operands("BTD", "DR", "RD", hidden="BTE"), ("BTD", "BTR")
        offset = None if operands.offset is None else "D"
        return Operands("BTD", "DR", "RD", offset), ("BTD", "BTE")

    def why_no_kernel(self, name: Pass, options: Options, operands: Operands[Any]) -> str | None:
        width, rank = operands.first.shape
        if (outputs := operands.second.shape[1]) != width:
            return f"C = {width} and D = {outputs}; the cuda kernels take C = D"
        of_width = Size("C =", width, WIDTH_MULTIPLE, MAX_WIDTH)
        of_rank = Size("R =", rank, RANK_MULTIPLE, MAX_RANK)
        return _products.why_not(options, operands.rows, (of_width, of_rank), MIN_TOKENS)

    def formula(
        self, name: Pass, options: Options, operands: Operands[Array]
    ) -> tuple[Array, Array]:
        """Forward y and `hidden`, backward dx and the gradient of the first product."""
        rows, first, second = operands.rows, operands.first, operands.second
        if (hidden := operands.hidden) is None:
            hidden = ACTIVATIONS[self.activation](by_input(rows, first))
            return _second(hidden, second, operands.offset)
        slopes = SLOPES[self.activation](hidden[..., : first.shape[-1]].astype(jnp.float32))
        dhidden = (by_input(rows, second.T).astype(jnp.float32) * slopes).astype(rows.dtype)
        return by_input(dhidden, first.T), dhidden

    def kernel(
        self, name: Pass, options: Options, operands: Operands[Array]
    ) -> tuple[Array, Array]:
        """The products on one device."""
        rows, rank, last = operands.rows, operands.first.shape[-1], operands.hidden
        if last is None:
            last = operands.offset
            rank += 0 if last is None else OFFSET_COLUMNS
        nothing = jnp.zeros(0, rows.dtype)
        results = [(rows.shape, rows.dtype), ((*rows.shape[:2], rank), rows.dtype)]
        given = rows, operands.first, operands.second, nothing if last is None else last
        y, hidden = library.call(TARGETS[self.activation, name], results, *given)
        return y, hidden
