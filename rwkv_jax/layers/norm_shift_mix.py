"""Layer normalisation, token shift and mixing."""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from rwkv_jax._operator import check
from rwkv_jax._operator.call import Arrays
from rwkv_jax._typing import Operand
from rwkv_jax.layers._function import Function, per_token, run

LAYER_NORM_EPS = 1e-5
MAX_WIDTH = 4096
MIXES = (1, 6)
"""How many mixes the kernels are built for."""

TOKEN, NOTHING, STATE = range(3)
"""What stands before a token, as `origin` says it: the token before it in the row, nothing (zeros),
or the state."""


class Mixed(NamedTuple):
    """`x`, for its other uses, the mixed arrays, and of each token the mean and the
    1 / sqrt(variance + 1e-5), through which no gradients flow."""

    x: Float[Array, "B T D"]
    mixed: tuple[Float[Array, "B T D"], ...]
    moments: Float32[Array, "B T 2"]


def norm_shift_mix(
    x: Float[Operand, "B T D"],
    before: Float[Operand, "B D"],
    weight: Float32[Operand, " D"],
    bias: Float32[Operand, " D"],
    mix: Float32[Operand, "I D"],
    *,
    origin: Int32[Operand, "B T"] | None = None,
    implementation: str | None = None,
) -> Mixed:
    """Layer normalisation, token shift and mixing, as at the entrance of every mixing of RWKV:

        n[t] = (x[t] - mean) / sqrt(variance + 1e-5) * weight + bias
        mixed_i[t] = n[t] + (n[t - 1] - n[t]) * mix_i

    in float32, with `before` in place of n[-1].

    Args:
      x: tokens, float32, bfloat16 or float16.
      before: what stands before the first token, normalised already, in the dtype of `x`.
      weight: the scale of the normalisation.
      bias: its offset.
      mix: how much of the token before each of the I results takes.
      origin: for each token what stands before it: TOKEN, NOTHING or STATE of this module, and
        STATE for one token of a row at most. If None, `before` stands before the first token of
        each row.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None.

    Returns:
      `x` itself and the I mixed arrays, in the dtype of `x`, and the moments of the tokens. Using
      that `x` for what else is made of it, such as the residual connection, saves the backward pass
      an addition.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formulas are those of RWKV-LM's training code, `RWKV_Tmix_x070` and `RWKV_CMix_x070`.
    """
    rows, tokens = np.shape(x)[:2] if np.ndim(x) == 3 else (0, 0)
    if origin is None:
        origin = jnp.zeros((rows, 0), jnp.int32)
    else:
        check.array("norm_shift_mix", "origin", origin)
        if np.ndim(x) == 3 and (origin.shape != (rows, tokens) or origin.dtype != np.int32):
            raise ValueError(
                f"norm_shift_mix: origin is {origin.dtype} of shape {origin.shape}; accepted is "
                f"int32 [B, T] = [{rows}, {tokens}]"
            )
    found = run(
        _function(len(mix)),
        {"x": x, "before": before},
        {"weight": weight, "bias": bias, "mix": mix},
        implementation,
        {"origin": jnp.asarray(origin)},
    )
    mixed = tuple(found[_mixed(i)] for i in range(len(mix)))
    return Mixed(found["x"], mixed, found["moments"])


def _mixed(i: int) -> str:
    return f"mixed{i}"


def _formula(inputs: Arrays) -> Arrays:
    x, before, origin = inputs["x"], inputs["before"], inputs["origin"]
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    wide = wide - mean
    scale = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    n = wide * scale
    n = n * per_token(inputs["weight"]) + per_token(inputs["bias"])
    earlier = shifted(n, before.astype(jnp.float32), origin if origin.shape[1] else None)
    mix = inputs["mix"]
    mixed = {
        _mixed(i): (n + (earlier - n) * per_token(mix[:, i])).astype(x.dtype)
        for i in range(mix.shape[1])
    }
    return {**mixed, "moments": jnp.concatenate([mean, scale], axis=-1)}


def shifted(
    x: Float[Array, "B T D"], state: Float[Array, "B D"], origin: Int32[Array, "B T"] | None
) -> Float[Array, "B T D"]:
    """What stands before each token of `x`, as `origin` says it."""
    if x.shape[1] == 0:
        return x
    # Where the tokens are distributed over devices, the compiler finds that this exchanges one.
    before = lax.pad(x, jnp.zeros((), x.dtype), ((0, 0, 0), (1, -1, 0), (0, 0, 0)))
    if origin is None:
        return lax.dynamic_update_slice_in_dim(before, state[:, None], 0, axis=1)
    which = origin[..., None]
    before = jnp.where(which == STATE, state[:, None], before)
    return jnp.where(which == NOTHING, jnp.zeros_like(x), before)


def _limits(sizes: Mapping[str, int]) -> str | None:
    width, mixes = sizes["D"], sizes["I"]
    if width > MAX_WIDTH or width % 16 or not width:
        return f"D = {width}; the cuda kernels take multiples of 16 up to {MAX_WIDTH}"
    if mixes not in MIXES:
        return f"I = {mixes}; the cuda kernels take {' or '.join(map(str, MIXES))} mixes"
    return None


@functools.cache
def _function(mixes: int) -> Function:
    """The function with so many results."""
    return Function(
        "norm_shift_mix",
        tensors={"x": "BTD", "before": "BD"},
        parameters={"weight": "D", "bias": "D", "mix": "ID"},
        indices={"origin": "BO"},
        results={_mixed(i): "BTD" for i in range(mixes)},
        kept={"moments": "BTE"},
        passed=("x",),
        compute=_formula,
        limits=_limits,
    )


_function(1)  # so that the targets, whose names are the same for all, are declared
