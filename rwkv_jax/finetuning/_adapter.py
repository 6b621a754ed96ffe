"""LoRA and DoRA: trainable matrices of low rank beside the matrices of a model."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Float, Key

from rwkv_jax._operator import check
from rwkv_jax.finetuning import _dora, _patterns
from rwkv_jax.models import _parameters
from rwkv_jax.models._generations import generation_of_params
from rwkv_jax.models._linear import Adapted, AnyWeight, Dropout, Weight, WeightByInput
from rwkv_jax.models._trees import Params, unstacked

TARGETS = ("att.receptance", "att.key", "att.value", "att.output", "ffn.key", "ffn.value")
"""The matrices of a block that RWKV-4 to 7 have and that an adapter is for by default."""


class LowRank(NamedTuple):
    """The two matrices beside a matrix [outputs, inputs]: A [rank, inputs] and B [outputs, rank].
    DoRA has the magnitude of each output as well [outputs]. The names are those of PEFT."""

    lora_A: Array
    lora_B: Array
    lora_magnitude_vector: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """LoRA or DoRA, a tree whose leaves are the matrices and the magnitudes. It is the same for
    parameters in either form.

    Attributes:
      matrices: A and B, and the magnitudes of DoRA, by the official name of the matrix, such as
        "blocks.0.att.key".
      alpha: the factor of the product, see `adapted`.
      rslora: whether this factor falls as the square root of the rank.
      dropout: the share of the inputs of A that are left out in training.
    """

    matrices: dict[str, LowRank]
    alpha: float = dataclasses.field(metadata={"static": True})
    rslora: bool = dataclasses.field(default=False, metadata={"static": True})
    dropout: float = dataclasses.field(default=0.0, metadata={"static": True})

    @property
    def dora(self) -> bool:
        """Whether it is DoRA."""
        return any(low.lora_magnitude_vector is not None for low in self.matrices.values())


def init_adapter(
    key: Key[Array, ""],
    params: Any,
    *,
    rank: int = 32,
    alpha: float = 32.0,
    targets: Sequence[str] = TARGETS,
    rslora: bool = False,
    dropout: float = 0.0,
    dora: bool = False,
    dtype: DTypeLike = jnp.float32,
) -> Adapter:
    """An adapter that changes nothing yet: A is uniform between -1 / sqrt(inputs) and
    1 / sqrt(inputs), as in PEFT, B is zero, and the magnitudes of DoRA are the norms of the rows of
    the matrices.

    Args:
      key: a random key.
      params: the parameters of the model, in either form, or their shapes if it is not DoRA.
      rank: the rank of the product B A.
      alpha: the factor of it, see `adapted`.
      targets: patterns of the names of matrices, with `*`, `?` and `[...]`: of whole names, as
        "blocks.[01].att.*", or of what is behind a dot, as "att.key" or "key". The matrices are
        those of the linear maps of blocks, but not w1, w2 and the like, which are of low rank.
      rslora: as `Adapter` has it.
      dropout: likewise; from 0 to less than 1.
      dora: whether it is DoRA, which has magnitudes, in float32.
      dtype: the dtype of A and B.

    Raises:
      TypeError: `params` are not the parameters of a model, or an argument has the wrong type.
      ValueError: a pattern is that of no matrix, or a number is not accepted.

    Sources: "LoRA: Low-Rank Adaptation of Large Language Models" (arXiv:2106.09685) and "DoRA:
    Weight-Decomposed Low-Rank Adaptation" (arXiv:2402.09353).
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

    if dora and any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(params)):
        raise TypeError(f"{what}: params are shapes; accepted for dora are arrays")
    norms = _norms(params, sizes) if dora else {}

    def low_rank(key: Array, name: str) -> LowRank:
        outputs, inputs = sizes[name]
        most = 1 / math.sqrt(inputs)
        first = jax.random.uniform(key, (rank, inputs), minval=-most, maxval=most)
        second = jnp.zeros((outputs, rank), dtype)
        return LowRank(first.astype(dtype), second, norms.get(name))

    found = {name: low_rank(k, name) for name, k in zip(sizes, keys, strict=True)}
    return Adapter(found, alpha, rslora, dropout)


def _norms(params: Any, names: Collection[str]) -> dict[str, Array]:
    """The norms of the rows of matrices, those of these names among them."""
    layers = len(jax.eval_shape(unstacked, params).blocks)
    found: dict[str, Array] = {}

    def add(path: KeyPath, x: Any) -> None:
        own = _official(_parameters.name(path), layers)
        if any(name in names for name in own):
            found.update(zip(own, _dora.norms(x).reshape(len(own), -1), strict=True))

    jax.tree_util.tree_map_with_path(add, params, is_leaf=_is_weight)
    return found


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

    with s = alpha / rank or, for rsLoRA, s = alpha / sqrt(rank). DoRA multiplies each output of
    this y by m / |W + s B A|, its magnitude m and the norm of its row of W + s B A, which is a
    constant for gradients. All products are in the dtype of the activations, W stays as it is
    stored, in bfloat16 or int8 for example, and no matrix W + B A is made. With `key` a share
    `adapter.dropout` of the numbers in x, drawn anew for each matrix, is zero before A, and the
    others are divided by 1 - dropout. In DoRA W has the same inputs as A, and the product of W with
    x minus these inputs is added without a magnitude, as in PEFT.

    Call it inside the function that is differentiated with respect to `adapter`. The gradient of
    what `params` has is then never computed. `rwkv_jax.generation` and `rwkv_jax.serving` take the
    result as well, and so does `models.quantize`, which leaves all but W as it is.

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

    Sources: LoRA (arXiv:2106.09685), rsLoRA (arXiv:2312.03732) and DoRA (arXiv:2402.09353).
    """
    return _adapted("adapted", params, adapter, key)


def _adapted(what: str, params: Any, adapter: Adapter, key: Array | None = None) -> Params:
    """`adapted`, with errors that begin with `what`."""
    _check(what, adapter, matrices(what, params))
    names = sorted(adapter.matrices)  # the order that a dictionary has within `jit`
    keys = None
    if key is not None and adapter.dropout > 0:
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def low_rank(name: str) -> tuple[Array, Array, Dropout | None, Array | None]:
        first, second, magnitude = adapter.matrices[name]
        rank = len(first)
        scale = adapter.alpha / (math.sqrt(rank) if adapter.rslora else rank)
        dropout = None
        if keys is not None:
            dropout = Dropout(keys[name], jnp.float32(adapter.dropout))
        return first, second * scale, dropout, magnitude

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
        parts = present[0]
        if ".rest." in name:
            parts = jax.tree.map(lambda *xs: jnp.stack(xs), *present)
        first, second, dropout, magnitude = parts
        gain = None if magnitude is None else _dora.gain(x, first, second, magnitude)
        return Adapted(x, first, second, dropout, gain)

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
        given = {part: x.shape for part, x in low._asdict().items() if x is not None}
        expected = shapes(sizes[name], len(low.lora_A), dora="lora_magnitude_vector" in given)
        if given != expected:
            raise ValueError(
                f"{what}: the adapter has {_listed(given)} for {name}; accepted are "
                f"{_listed(expected)}"
            )


def shapes(size: tuple[int, int], rank: int, *, dora: bool) -> dict[str, tuple[int, ...]]:
    """The shapes that a `LowRank` beside a matrix of this size has, by its fields."""
    outputs, inputs = size
    of_magnitude = {"lora_magnitude_vector": (outputs,)} if dora else {}
    return {"lora_A": (rank, inputs), "lora_B": (outputs, rank), **of_magnitude}


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{part} {list(shape)}" for part, shape in shapes.items())


def merge(params: Any, adapter: Adapter) -> Params:
    """Parameters without an adapter that compute what `adapted` ones do without dropout: in place
    of W, W + s B A with the magnitudes of DoRA, computed in float32 and rounded to the dtype of W.

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
        matrix = x.base.wide().astype(jnp.float32) + _product(x.lora_B, x.lora_A)
        if x.gain is not None:
            matrix = x.gain[..., None] * matrix
        if isinstance(x.base, WeightByInput):
            matrix = jnp.matrix_transpose(matrix)
            return WeightByInput(matrix.astype(x.base.by_input.dtype))
        return Weight(matrix.astype(x.base.weight.dtype))

    return jax.tree_util.tree_map_with_path(
        merged, _adapted("merge", params, adapter), is_leaf=lambda x: isinstance(x, Adapted)
    )


def _product(
    second: Float[Array, "*blocks outputs rank"], first: Float[Array, "*blocks rank inputs"]
) -> Float[Array, "*blocks outputs inputs"]:
    """B A in float32."""
    second, first = second.astype(jnp.float32), first.astype(jnp.float32)
    return jnp.matmul(second, first, precision="highest")
