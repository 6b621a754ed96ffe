"""The value that all layers of RWKV-7 but the first share with the first one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Float32

from rwkv_jax._operator.call import Arrays
from rwkv_jax._typing import Operand
from rwkv_jax.layers._function import Function, head_sizes, per_token, run


class Values(NamedTuple):
    """The value for `wkv7`, the same for `read_out`, and the value of the first layer for the layer
    after this one."""

    value: Float[Array, "B T H V"]
    value_again: Float[Array, "B T H V"]
    first: Float[Array, "B T H V"]


def value_residual(
    v: Float[Operand, "B T H V"],
    rate: Float[Operand, "B T H V"],
    first: Float[Operand, "B T H V"],
    v0: Float32[Operand, "H V"],
    *,
    implementation: str | None = None,
) -> Values:
    """The value of a layer of RWKV-7 but the first:

        value = v + (first - v) * sigmoid(v0 + rate)

    in float32.

    Args:
      v: the projected value, float32, bfloat16 or float16.
      rate: the low-rank projection of the share of `first`.
      first: the value of the first layer.
      v0: the parameter of this name.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      The value in the dtype of `v`, twice, and `first` itself. The backward pass adds up the
      cotangents of both values while it reads them, so give one to `wkv7` and the other to
      `read_out`; and it adds that of `first`, so give this one to the next layer.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formula is that of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    found = run(FUNCTION, {"v": v, "rate": rate, "first": first}, {"v0": v0}, implementation)
    return Values(found["value"], found["value_again"], found["first"])


def _formula(inputs: Arrays) -> Arrays:
    v, rate, first = (inputs[name].astype(jnp.float32) for name in ("v", "rate", "first"))
    value = v + (first - v) * jax.nn.sigmoid(rate + per_token(inputs["v0"]))
    return {"value": value.astype(inputs["v"].dtype)}


FUNCTION = Function(
    "value_residual",
    tensors={"v": "BTHK", "rate": "BTHK", "first": "BTHK"},
    parameters={"v0": "HK"},
    results={"value": "BTHK"},
    again=("value",),
    passed=("first",),
    compute=_formula,
    limits=head_sizes,
)
