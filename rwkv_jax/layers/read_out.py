"""What a layer makes of the output of its operator before the output product."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax._operator.call import Arrays
from rwkv_jax._typing import Operand
from rwkv_jax.layers._function import Function, head_sizes, per_token, run

GROUP_NORM_EPS = 64e-5


def read_out(
    y: Float[Operand, "B T H K"],
    bonus: Float32[Operand, "B T H"],
    v: Float[Operand, "B T H K"],
    gate: Float[Operand, "B T H K"],
    weight: Float32[Operand, "H K"],
    bias: Float32[Operand, "H K"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """What RWKV-7 makes of the output `y` of `wkv7`, for each head:

        z = (y - mean) / sqrt(variance + 64e-5) * weight + bias
        out = (z + bonus * v) * gate

    in float32.

    Args:
      y: the output of `wkv7`, float32, bfloat16 or float16.
      bonus: the result of this name of `wkv7_keys`.
      v: an operand of `wkv7`.
      gate: the output gate.
      weight: the scale of the normalisation of a head.
      bias: its offset.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      `out`, in the dtype of `y`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formulas are those of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    tensors = {"y": y, "bonus": bonus, "v": v, "gate": gate}
    return run(FUNCTION, tensors, {"weight": weight, "bias": bias}, implementation)["out"]


def _formula(inputs: Arrays) -> Arrays:
    y, v, gate = (inputs[name].astype(jnp.float32) for name in ("y", "v", "gate"))
    y = y - y.mean(-1, keepdims=True)
    z = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + GROUP_NORM_EPS)
    z = z * per_token(inputs["weight"]) + per_token(inputs["bias"])
    return {"out": ((z + inputs["bonus"][..., None] * v) * gate).astype(inputs["y"].dtype)}


FUNCTION = Function(
    "read_out",
    tensors={"y": "BTHK", "bonus": "BTH", "v": "BTHK", "gate": "BTHK"},
    parameters={"weight": "HK", "bias": "HK"},
    results={"out": "BTHK"},
    float32=("bonus",),
    compute=_formula,
    limits=head_sizes,
)
