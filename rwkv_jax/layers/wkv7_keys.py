"""The operands k, a and b of `wkv7`, and what `read_out` needs of r and k."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax._operator.call import Arrays
from rwkv_jax._typing import Operand
from rwkv_jax.layers._function import Function, head_sizes, per_token, run

UNIT_LENGTH_EPS = 1e-12


class Wkv7Keys(NamedTuple):
    """The operands of `wkv7`, `r` among them, and the bonus of each head for `read_out`."""

    k: Float[Array, "B T H K"]
    a: Float[Array, "B T H K"]
    b: Float[Array, "B T H K"]
    bonus: Float32[Array, "B T H"]
    r: Float[Array, "B T H K"]


def wkv7_keys(
    k: Float[Operand, "B T H K"],
    rate: Float[Operand, "B T H K"],
    r: Float[Operand, "B T H K"],
    k_k: Float32[Operand, "H K"],
    k_a: Float32[Operand, "H K"],
    a0: Float32[Operand, "H K"],
    r_k: Float32[Operand, "H K"],
    *,
    implementation: str | None = None,
) -> Wkv7Keys:
    """The operands k, a and b of `wkv7` from the projections of RWKV-7, for each head:

        alpha = sigmoid(a0 + rate)
        kk = k * k_k / max(|k * k_k|, 1e-12)
        k' = k * (1 + (alpha - 1) * k_a),  a = -kk,  b = kk * alpha
        bonus = sum(r * k' * r_k)

    in float32.

    Args:
      k: the projected keys, float32, bfloat16 or float16.
      rate: the low-rank projection of the in-context learning rate.
      r: the projected receptance, an operand of `wkv7`.
      k_k: the parameter of this name.
      k_a: the parameter of this name.
      a0: the parameter of this name.
      r_k: the parameter of this name.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      k', a and b in the dtype of `k`, the bonus in float32, and `r` itself. The backward pass adds
      the cotangent of this `r` to the one that the bonus gives, so give it to `wkv7`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formulas are those of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    parameters = {"k_k": k_k, "k_a": k_a, "a0": a0, "r_k": r_k}
    found = run(FUNCTION, {"k": k, "rate": rate, "r": r}, parameters, implementation)
    return Wkv7Keys(*(found[name] for name in ("key", "a", "b", "bonus", "r")))


def inverse_length(
    k: Float[Array, "B T H K"], k_k: Float32[Array, "B H K"]
) -> Float32[Array, "B T H"]:
    """1 / max(|k * k_k|, 1e-12)."""
    u = k.astype(jnp.float32) * per_token(k_k)
    square = (u * u).sum(-1)
    # Not `jnp.maximum`: its derivative compares `square` with the result, and the compiler may
    # compute the sum twice and round it differently.
    return lax.rsqrt(jnp.where(square < UNIT_LENGTH_EPS**2, UNIT_LENGTH_EPS**2, square))


def _formula(inputs: Arrays) -> Arrays:
    k, dtype = inputs["k"].astype(jnp.float32), inputs["k"].dtype
    alpha = jax.nn.sigmoid(inputs["rate"].astype(jnp.float32) + per_token(inputs["a0"]))
    kk = k * per_token(inputs["k_k"]) * inverse_length(inputs["k"], inputs["k_k"])[..., None]
    key = k * (1 + (alpha - 1) * per_token(inputs["k_a"]))
    bonus = (inputs["r"].astype(jnp.float32) * key * per_token(inputs["r_k"])).sum(-1)
    results = {"key": key, "a": -kk, "b": kk * alpha}
    return {"bonus": bonus, **{name: x.astype(dtype) for name, x in results.items()}}


FUNCTION = Function(
    "wkv7_keys",
    tensors={"k": "BTHK", "rate": "BTHK", "r": "BTHK"},
    parameters={"k_k": "HK", "k_a": "HK", "a0": "HK", "r_k": "HK"},
    results={"key": "BTHK", "a": "BTHK", "b": "BTHK", "bonus": "BTH"},
    passed=("r",),
    float32=("bonus",),
    compute=_formula,
    limits=head_sizes,
)
