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
    r: Float[Operand, "B T H K"],
    k: Float[Operand, "B T H K"],
    v: Float[Operand, "B T H K"],
    gate: Float[Operand, "B T H K"],
    weight: Float32[Operand, "H K"],
    bias: Float32[Operand, "H K"],
    r_k: Float32[Operand, "H K"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B T H K"]:
    """What RWKV-7 makes of the output `y` of `wkv7`, for each head:

        z = (y - mean) / sqrt(variance + 64e-5) * weight + bias
        out = (z + sum(r * k * r_k) * v) * gate

    in float32.

    Args:
      y: the output of `wkv7`, float32, bfloat16 or float16.
      r: an operand of `wkv7`.
      k: an operand of `wkv7`.
      v: an operand of `wkv7`.
      gate: the output gate.
      weight: the scale of the normalisation of a head.
      bias: its offset.
      r_k: the parameter of this name.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      `out`, in the dtype of `y`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formulas are those of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    tensors = {"y": y, "r": r, "k": k, "v": v, "gate": gate}
    parameters = {"weight": weight, "bias": bias, "r_k": r_k}
    return run(FUNCTION, tensors, parameters, implementation)["out"]


def _formula(inputs: Arrays) -> Arrays:
    y, r, k, v, gate = (inputs[x].astype(jnp.float32) for x in ("y", "r", "k", "v", "gate"))
    y = y - y.mean(-1, keepdims=True)
    z = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + GROUP_NORM_EPS)
    z = z * per_token(inputs["weight"]) + per_token(inputs["bias"])
    bonus = (r * k * per_token(inputs["r_k"])).sum(-1, keepdims=True) * v
    return {"out": ((z + bonus) * gate).astype(inputs["y"].dtype)}


FUNCTION = Function(
    "read_out",
    tensors=dict.fromkeys(("y", "r", "k", "v", "gate"), "BTHK"),
    parameters={"weight": "HK", "bias": "HK", "r_k": "HK"},
    results={"out": "BTHK"},
    formula=_formula,
    limits=head_sizes,
)
