"""Weights of 8 bits: parameters that take a quarter of the memory of float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, core
from jax.tree_util import KeyPath
from jaxtyping import Float

from rwkv_jax._operator import check
from rwkv_jax.models import _not_finite, _parameters, _row_product
from rwkv_jax.models._decoding import by_input
from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._trees import Params


def quantize(params: Any, *, group: int | None = None) -> Params:
    """The parameters of a model of any generation with int8 in place of the matrices of its linear
    maps and of its head.

    For each output, or each `group` of consecutive inputs of an output,

        scale = max(|weight|) / 127        weight_int8 = round(weight / scale)

    and a linear map multiplies with `scale * weight_int8`. The embedding, other tables, low-rank
    maps, vectors and normalisations stay as they are. `hidden_states`, `apply`, `shardings` and
    `rwkv_jax.generation` take such parameters as any others, and `save` and `load` keep them:
    beside a tensor `X.weight` of int8 there is `X.scale`, float32 [outputs, groups]. They are for
    inference: gradients with respect to a state or to `scale` are those of the formula, and
    `jax.grad` refuses integers, so that the weights cannot be trained.

    Args:
      params: the parameters, in either form.
      group: how many inputs of an output share a scale; all if None.

    Returns:
      The parameters, in the same form.

    Raises:
      TypeError: `params` are not the parameters of a model, or `group` is no integer.
      ValueError: `group` does not divide the inputs of a matrix, or a matrix is quantised already,
        or has NaN or an infinity. Inside `jit`, where numbers are not known, such a group gets an
        infinite scale instead, with which all that it stands for is NaN.
    """
    if not isinstance(params, Params):
        raise TypeError(f"quantize: params is a {type(params).__name__}; accepted is a Params")
    check_group("quantize", group)
    return jax.tree_util.tree_map_with_path(
        functools.partial(part, group=group),
        params,
        is_leaf=lambda x: isinstance(x, Weight | WeightByInput),
    )


def check_group(what: str, group: int | None) -> None:
    """Raise an error that begins with `what` unless `group` is one."""
    if group is not None:
        check.number(what, "group", group, 1)


def part(path: KeyPath, x: Any, *, group: int | None) -> Any:
    """What `quantize` makes of a weight or of another array at `path`."""
    name = _parameters.name(path)
    if isinstance(x, WeightByInput):
        return by_input(part(path, Weight(jnp.matrix_transpose(x.by_input), x.scale), group=group))
    if not isinstance(x, Weight) or name == "emb":
        return x
    if x.scale is not None:
        raise ValueError(f"quantize: {name} has a scale; accepted are weights without one")
    inputs = x.weight.shape[-1]
    size = inputs if group is None else group
    if inputs % size:
        raise ValueError(
            f"quantize: group is {group}; accepted is a divisor of the {inputs} inputs of {name}"
        )
    small = _quantized(x.weight, inputs // size)
    if not isinstance(small.scale, core.Tracer) and not jnp.all(jnp.isfinite(small.scale)):
        raise ValueError(f"quantize: {name} has NaN or an infinity; accepted are finite numbers")
    return small


@functools.partial(jax.jit, static_argnums=1)
def _quantized(weight: Float[Array, "*blocks outputs inputs"], groups: int) -> Weight:
    grouped = weight.astype(jnp.float32).reshape(*weight.shape[:-1], groups, -1)
    scale = _not_finite.largest(jnp.abs(grouped)) / _row_product.LARGEST
    # A group of zeros has any scale. On a mesh a matrix that is not reshaped stays where it is.
    divisor = jnp.repeat(jnp.where(scale == 0, 1, scale), grouped.shape[-1], axis=-1)
    return Weight(jnp.round(weight.astype(jnp.float32) / divisor).astype(jnp.int8), scale)
