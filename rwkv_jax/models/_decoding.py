"""Parameters as decoding reads them with the fewest bytes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from rwkv_jax.models import _parameters
from rwkv_jax.models._linear import Weight, WeightByInput
from rwkv_jax.models._trees import Params


def for_decoding(params: Any) -> Params:
    """The parameters of a model of any generation, stored as decoding reads them with the fewest
    bytes.

    In the channel mixing, most numbers of max(K x, 0)^2 are zeros once a model is trained, and what
    the matrix `ffn.value` has for an input that is zero adds nothing. So this matrix is stored as
    `ffn.value.by_input` [inputs, outputs] in place of `ffn.value.weight` [outputs, inputs]. On
    CPUs, a step of a few rows then reads only the inputs that are not zero in all rows, and on CUDA
    GPUs a step of one row of RWKV-7 does so where the kernels of whole blocks run. The results are
    those of the whole matrix but for rounding, as long as its numbers are finite: zero times an
    infinite number or NaN counts as zero. Everything else reads the whole matrix.

    `hidden_states`, `apply`, `shardings`, `quantize`, `rwkv_jax.generation` and `rwkv_jax.serving`
    take such parameters as any others, and `save` writes the official layout. All other parameters
    are shared with `params`.

    Args:
      params: the parameters, in either form, quantised or not.

    Returns:
      The parameters, in the same form.

    Raises:
      TypeError: `params` are not the parameters of a model.
    """
    if not isinstance(params, Params):
        raise TypeError(f"for_decoding: params is a {type(params).__name__}; accepted is a Params")

    def prepared(path: KeyPath, x: Any) -> Any:
        is_value = isinstance(x, Weight) and _parameters.name(path).endswith("ffn.value")
        return by_input(x) if is_value else x

    return jax.tree_util.tree_map_with_path(
        prepared, params, is_leaf=lambda x: isinstance(x, Weight | WeightByInput)
    )


def by_input(weight: Weight) -> WeightByInput:
    """The same weight, or weights of several blocks, with the numbers of an input side by side."""
    return WeightByInput(jnp.matrix_transpose(weight.weight), weight.scale)
