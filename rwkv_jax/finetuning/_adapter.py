"""LoRA: trainable matrices of low rank beside the matrices of a model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Float, Key

from rwkv_jax._operator import check
from rwkv_jax.finetuning import _patterns
from rwkv_jax.models import _parameters
from rwkv_jax.models._generations import generation_of_params
from rwkv_jax.models._linear import Adapted, AnyWeight, Dropout, Weight, WeightByInput
from rwkv_jax.models._trees import Params, unstacked

TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
"""The matrices of a block that RWKV-4 to 7 have and that an adapter is for by default."""


class LowRank(NamedTuple):
    """The two matrices beside a matrix [outputs, inputs]: A [rank, inputs] and B [outputs, rank].
    The names are those of PEFT."""

    lora_A: Array
    lora_B: Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA, a tree whose leaves are the matrices. It is the same for parameters in either form.

    Attributes:
      matrices: A and B by the official name of the matrix, such as "blocks.0.att.key".
      alpha: the factor of the product, see `adapted`.
      rslora: whether this factor falls as the square root of the rank.
      dropout: the share of the inputs of A that are left out in training.
    """

    matrices: dict[str, LowRank]
    alpha: float = dataclasses.field(metadata={"static": True})
    rslora: bool = dataclasses.field(default=False, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})


def init_adapter(
    key: Key[Array, ""],
    params: Any,
    *,
    rank: int = 32,
    alpha: float = 32.0,
    targets: Sequence[str] = TARGETS,
    rslora: bool = False,
    dropout: float = 0.0,
    dtype: DTypeLike = jnp.float32,
) -> Adapter:
    """An adapter that changes nothing yet: A is uniform between -1 / sqrt(inputs) and
    1 / sqrt(inputs), as in PEFT, and B is zero.

    Args:
      key: a random key.
      params: the parameters of the model, in either form, or their shapes.
      rank: the rank of the product B A.
      alpha: the factor of it, see `adapted`.
      targets: patterns of the names of matrices, with `*`, `?` and `[...]`: of whole names, as
        "blocks.[01].att.*", or of what is behind a dot, as "att.key" or "key". The matrices are
        those of the linear maps of blocks, but not w1, w2 and the like, which are of low rank.
      rslora: as `Adapter` has it.
      dropout: likewise; from 0 to less than 1.
      dtype: the dtype of A and B.

    Raises:
      TypeError: `params` are not the parameters of a model, or an argument has the wrong type.
      ValueError: a pattern is that of no matrix, or a number is not accepted.

    Source: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685).
    """
    what = "init_adapter"
    check.number(what, "rank", rank, 1)
    alpha, dropout = numbers(what, alpha, dropout)
    sizes = matrices(what, params)
    for pattern in targets:
        if not any(_patterns.matches(name, [pattern]) for name in sizes):
            some = ", ".join(name for name in sizes if name.startswith("blocks.0."))
            raise ValueError(f"{what}: targets has {pattern!r}; accepted are patterns of {some}")
    sizes = {name: size for name, size in sizes.items() if _patterns.matches(name, targets)}
    if not sizes:
        raise ValueError(f"{what}: targets is empty; accepted are names such as {TARGETS[0]}")
    keys = jax.random.split(key, len(sizes))
    dtype = _parameters.floating(what, dtype)

    def low_rank(key: Array, outputs: int, inputs: int) -> LowRank:
        most = 1 / math.sqrt(inputs)
        first = jax.random.uniform(key, (rank, inputs), minval=-most, maxval=most)
        return LowRank(first.astype(dtype), jnp.zeros((outputs, rank), dtype))

    found = {name: low_rank(k, *sizes[name]) for name, k in zip(sizes, keys, strict=True)}
    return Adapter(found, alpha, rslora, dropout)


def numbers(what: str, alpha: Any, dropout: Any) -> tuple[float, float]:
    """`alpha` and `dropout` as floats.

    Raises:
      TypeError, ValueError: one is not accepted. The message begins with `what`.
    """
    alpha, dropout = check.real(what, "alpha", alpha), check.real(what, "dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"{what}: dropout is {dropout}; accepted are numbers from 0 to below 1")
    return alpha, dropout


def matrices(what: str, params: Any) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of each matrix that an adapter can be for, by its official name.

    Raises:
      TypeError: `params` are not the parameters of a model. The message begins with `what`.
      ValueError: they have an adapter.
    """
    params = generation_of_params(what, params).checked(params)
    found: dict[str, tuple[int, int]] = {}

    def add(path: KeyPath, x: Any) -> None:
        name = _parameters.name(path)
        if isinstance(x, Adapted):
            raise ValueError(f"{what}: params has an adapter; accepted are those without one")
        if name.startswith("blocks.") and isinstance(x, Weight):
            outputs, inputs = x.weight.shape
            found[name] = outputs, inputs
        elif isinstance(x, WeightByInput):
            inputs, outputs = x.by_input.shape
            found[name] = outputs, inputs

    shapes = jax.eval_shape(unstacked, params)
    jax.tree_util.tree_map_with_path(add, shapes, is_leaf=_is_weight)
    return found


def _is_weight(x: Any) -> bool:
    return isinstance(x, AnyWeight)


def adapted(params: Any, adapter: Adapter, *, key: Key[Array, ""] | None = None) -> Params:
    """Parameters with an adapter, for the functions of the model. In place of

        y = W x        there is        y = W x + s B (A x)

    with s = alpha / rank or, for rsLoRA, s = alpha / sqrt(rank). All products are in the dtype of
    the activations, W stays as it is stored, in bfloat16 or int8 for example, and no matrix W + B A
    is made. With `key` a share `adapter.dropout` of the numbers in x, drawn anew for each matrix,
    is zero before A, and the others are divided by 1 - dropout.

    Call it inside the function that is differentiated with respect to `adapter`. The gradient of
    what `params` has is then never computed. `rwkv_jax.generation` and `rwkv_jax.serving` take the
    result as well, and so does `models.quantize`, which leaves A and B as they are.

    Fused kernels of the channel mixing and of whole blocks take plain matrices: where they are
    adapted, products by the compiler stand in for them. All other kernels run as without an
    adapter.

    Args:
      params: the parameters, in either form. In the stacked form all blocks but the first have the
        same matrices adapted.
      adapter: the adapter.
      key: a random key for dropout; None outside of training.

    Returns:
      The parameters, whose arrays are those of `params`.

    Raises:
      TypeError: `params` are not the parameters of a model, or `adapter` is no adapter.
      ValueError: they have an adapter already, or the adapter is for other matrices, sizes or
        blocks.

    Sources: LoRA (arXiv:2106.09685) and rsLoRA (arXiv:2312.03732).
    """
    return _adapted("adapted", params, adapter, key)


def _adapted(what: str, params: Any, adapter: Adapter, key: Array | None = None) -> Params:
    """`adapted`, with errors that begin with `what`."""
    _check(what, adapter, matrices(what, params))
    names = sorted(adapter.matrices)  # the order that a dictionary has within `jit`
    keys = None
    if key is not None and adapter.dropout > 0:
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def low_rank(name: str) -> tuple[Array, Array, Dropout | None]:
        first, second = adapter.matrices[name]
        rank = len(first)
        scale = adapter.alpha / (math.sqrt(rank) if adapter.rslora else rank)
        dropout = None
        if keys is not None:
            dropout = Dropout(keys[name], jnp.float32(adapter.dropout))
        return first, second * scale, dropout

    layers = len(jax.eval_shape(unstacked, params).blocks)

    def with_adapter(path: KeyPath, x: Any) -> Any:
        name = _parameters.name(path)
        if not _is_weight(x) or not name.startswith("blocks."):
            return x
        own = _official(name, layers)
        present = [low_rank(one) for one in own if one in adapter.matrices]
        if not present:
            return x
        if len(present) < len(own):
            raise ValueError(
                f"{what}: the adapter has {len(present)} of the {len(own)} matrices that {name} "
                "stands for; accepted for the stacked form are all or none of them"
            )
        if ".rest." not in name:
            return Adapted(x, *present[0])
        return Adapted(x, *jax.tree.map(lambda *xs: jnp.stack(xs), *present))

    return jax.tree_util.tree_map_with_path(with_adapter, params, is_leaf=_is_weight)


def _official(name: str, layers: int) -> list[str]:
    """The official names of the matrices that a name of either form stands for."""
    if name.startswith("blocks.first."):
        return [name.replace(".first.", ".0.", 1)]
    if name.startswith("blocks.rest."):
        return [name.replace(".rest.", f".{i}.", 1) for i in range(1, layers)]
    return [name]


def _check(what: str, adapter: Adapter, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Raise an error unless the adapter is one, for matrices of these sizes."""
    if not isinstance(adapter, Adapter):
        raise TypeError(f"{what}: adapter is a {type(adapter).__name__}; accepted is an Adapter")
    for name, low in adapter.matrices.items():
        if name not in sizes:
            raise ValueError(
                f"{what}: the adapter is for {name}, which is no matrix of a linear map in a block "
                "of params"
            )
        (rank, inputs), (outputs, other) = low.lora_A.shape, low.lora_B.shape
        if (outputs, inputs) != sizes[name] or rank != other:
            raise ValueError(
                f"{what}: the adapter has A {list(low.lora_A.shape)} and B "
                f"{list(low.lora_B.shape)} for {name}; accepted are [rank, {sizes[name][1]}] and "
                f"[{sizes[name][0]}, rank]"
            )


def merge(params: Any, adapter: Adapter) -> Params:
    """Parameters without an adapter that compute what `adapted` ones do without dropout: W + s B A
    in place of W, computed in float32 and rounded to the dtype of W.

    Args:
      params: the parameters, in either form.
      adapter: the adapter.

    Returns:
      The parameters, in the same form. Those without an adapter are shared with `params`.

    Raises:
      TypeError, ValueError: as `adapted` raises them; or a matrix with an adapter is int8.
    """

    def merged(path: KeyPath, x: Any) -> Any:
        if not isinstance(x, Adapted):
            return x
        if x.base.scale is not None:
            raise ValueError(
                f"merge: {_parameters.name(path)} is int8; accepted are floats. Merge the adapter "
                "with the parameters before they are quantised, or use it as `adapted` does"
            )
        product = _product(x.lora_B, x.lora_A)
        if isinstance(x.base, WeightByInput):
            return WeightByInput(_sum(x.base.by_input, jnp.matrix_transpose(product)))
        return Weight(_sum(x.base.weight, product))

    return jax.tree_util.tree_map_with_path(
        merged, _adapted("merge", params, adapter), is_leaf=lambda x: isinstance(x, Adapted)
    )


def _product(
    second: Float[Array, "*blocks outputs rank"], first: Float[Array, "*blocks rank inputs"]
) -> Float[Array, "*blocks outputs inputs"]:
    """B A in float32."""
    second, first = second.astype(jnp.float32), first.astype(jnp.float32)
    return jnp.matmul(second, first, precision="highest")


def _sum(weight: Array, product: Array) -> Array:
    return (weight.astype(jnp.float32) + product).astype(weight.dtype)
