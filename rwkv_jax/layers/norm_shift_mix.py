"""Layer normalisation, token shift and mixing."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float, Float32, Int32

from rwkv_jax._operator import check
from rwkv_jax._operator.call import Arrays, Options
from rwkv_jax._operator.dispatch import Pass
from rwkv_jax._operator.partition import Shards
from rwkv_jax._typing import Operand
from rwkv_jax.layers._function import Function, Operands, per_token, run

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
        each row. Where the tokens of a row are distributed over devices, those before the one with
        STATE are padding, whose results mean nothing.
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
    indices = {}
    if origin is not None:
        check.array("norm_shift_mix", "origin", origin)
        if np.ndim(x) == 3 and (origin.shape != x.shape[:2] or origin.dtype != np.int32):
            rows, tokens = x.shape[:2]
            raise ValueError(
                f"norm_shift_mix: origin is {origin.dtype} of shape {origin.shape}; accepted is "
                f"int32 [B, T] = [{rows}, {tokens}]"
            )
        indices["origin"] = jnp.asarray(origin)
    found = run(
        _function(len(mix), origin is not None),
        {"x": x, "before": before},
        {"weight": weight, "bias": bias, "mix": mix},
        implementation,
        indices,
    )
    mixed = tuple(found[_mixed(i)] for i in range(len(mix)))
    return Mixed(found["x"], mixed, found["moments"])


def _mixed(i: int) -> str:
    return f"mixed{i}"


class _Normalised(NamedTuple):
    n: Array
    mean: Array
    scale: Array


def _normalised(x: Array, weight: Array, bias: Array) -> _Normalised:
    """Tokens [B, T, D] in float32, and their moments [B, T, 1]."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    wide = wide - mean
    scale = lax.rsqrt((wide * wide).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    return _Normalised(wide * scale * per_token(weight) + per_token(bias), mean, scale)


def _formula(inputs: Arrays) -> Arrays:
    x, before = inputs["x"], inputs["before"]
    n, mean, scale = _normalised(x, inputs["weight"], inputs["bias"])
    earlier = shifted(n, before.astype(jnp.float32), inputs.get("origin"))
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


class _NormShiftMix(Function):
    """On a mesh that distributes tokens, the first token of a device has before it the last one of
    the device before, which hands it on. Nothing else is exchanged."""

    def implementation(
        self, name: Pass, choice: str, options: Options, platform: str, shards: Shards
    ) -> Callable[[Any], Any]:
        compute = super().implementation(name, choice, options, platform, shards)
        if not (axis := shards.get("T")):
            return compute
        return functools.partial(_on_each_device, name, compute, axis)

    def _native_inputs(self, inputs: Arrays) -> list[Array]:
        given = super()._native_inputs(inputs)
        if "origin" not in inputs:
            given.append(jnp.zeros((len(inputs["x"]), 0), jnp.int32))
        return given


def _on_each_device(
    name: Pass, compute: Callable[[Operands], Any], axis: Any, operands: Operands
) -> Any:
    """What `compute` gives of a pass for the tokens of this device, which are consecutive along
    `axis`."""
    inputs = operands.inputs
    x, origin = inputs["x"], inputs.get("origin")
    rows, tokens, _ = x.shape
    if tokens == 0:
        return compute(operands)
    from_state = jnp.full(rows, lax.axis_index(axis) == 0)
    if origin is not None:
        from_state |= jnp.any(origin == STATE, axis=1)
        first = origin[:, 0]
        first = jnp.where(from_state | (first != TOKEN), first, STATE)
        inputs = inputs | {"origin": origin.at[:, 0].set(first)}

    def stands_before(last: Array, before: Array, weight: Array, bias: Array) -> Array:
        n = _normalised(last[:, None], weight, bias).n[:, 0].astype(x.dtype)
        following = [(i, i + 1) for i in range(lax.axis_size(axis) - 1)]
        return jnp.where(from_state[:, None], before, lax.ppermute(n, axis, following))

    shared = ("before", "weight", "bias")
    before, pullback = jax.vjp(stands_before, x[:, -1], *(inputs[n] for n in shared))
    found = compute(Operands(inputs | {"before": before}, operands.kept, operands.cotangents))
    if name == "forward":
        return found
    dlast, dbefore, dweight, dbias = pullback(found["before"])
    return found | {
        "x": found["x"].at[:, -1].add(dlast),
        "before": dbefore,
        "weight": found["weight"] + dweight,
        "bias": found["bias"] + dbias,
    }


@functools.cache
def _function(mixes: int, has_origin: bool) -> Function:
    """The function with so many results."""
    return _NormShiftMix(
        "norm_shift_mix",
        tensors={"x": "BTD", "before": "BD"},
        parameters={"weight": "D", "bias": "D", "mix": "ID"},
        indices={"origin": "BT"} if has_origin else {},
        results={_mixed(i): "BTD" for i in range(mixes)},
        kept={"moments": "BTE"},
        passed=("x",),
        compute=_formula,
        limits=_limits,
    )


_function(1, False)  # so that the targets, whose names are the same for all, are declared
