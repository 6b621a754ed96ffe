"""Several low-rank maps, each with as many tokens of its own.

With a few thousand tokens the products of one map are too small for a GPU. The kernels compute the
first products of all maps at the same time, then the second ones. Gradients are left to the
compiler.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from rwkv_jax._native import library
from rwkv_jax._operator import check
from rwkv_jax._operator.call import Options
from rwkv_jax._operator.dispatch import Pass, run
from rwkv_jax._operator.partition import vary_alike
from rwkv_jax._typing import Operand
from rwkv_jax.layers import _products
from rwkv_jax.layers._products import PRODUCT, Products, Size, by_input
from rwkv_jax.layers.low_rank import ACTIVATIONS, MAX_WIDTH, RANK_MULTIPLE, SLOPES, low_rank

MAX_RANK = 1024

MIN_TOKENS, MAX_TOKENS = 512, 4096
"""None takes the kernels for so many tokens, for which they were measured to be faster."""

RANKS = "RQUWXYZ"
"""The axis letters of the ranks. There are no more maps than letters."""

TARGET = "rwkv_low_rank_maps_v1"
library.register_export_targets(TARGET)


class LowRankMap(NamedTuple):
    """A low-rank map and its tokens, as the arguments of `low_rank`."""

    x: Float[Operand, "B T C"]
    first: Float[Operand, "C R"]
    second: Float[Operand, "R D"]
    offset: Float[Operand, " D"] | None = None
    activation: str = "identity"


def low_rank_maps(
    maps: Sequence[LowRankMap], *, implementation: str | None = None
) -> tuple[Float[Array, "B T D"], ...]:
    """Several low-rank maps, each of which is for its own tokens what `low_rank` computes:

        y = activation(x first) second + offset

    Args:
      maps: one to seven of them, which share B, T, C, D and the dtype of `x`.
      implementation: "ffi", "xla", "reference" or, for the fastest one, None. "ffi" takes bfloat16
        on GPUs of compute capability 9.0, C = D a multiple of 8, and ranks that are multiples of 8
        up to 1024; None takes it there for 512 to 4096 tokens, and otherwise calls `low_rank` for
        each map. A program with "ffi" runs on no other GPU.

    Returns:
      y of each map, in the dtype of `x`.

    Raises:
      TypeError, ValueError: an argument has another shape or dtype.
      NotImplementedError: the implementation cannot run the call.

    The formula is that of RWKV-LM's training code, `RWKV_Tmix_x070`.
    """
    given = _checked(maps, implementation)
    several = _LowRankMaps(tuple(m.activation for m in maps))
    options = Options(implementation=implementation)
    operands = tuple(_rounded(*one) for one in given)
    if several.is_chosen(options, operands):
        leaves, structure = jax.tree.flatten(operands)
        operands = jax.tree.unflatten(structure, vary_alike(*leaves))
        return _run(several, options, operands)[1::2]
    return tuple(
        low_rank(*one, activation=m.activation, implementation=implementation)
        for one, m in zip(given, maps, strict=True)
    )


def _checked(maps: Sequence[LowRankMap], implementation: str | None) -> list["_Map"]:
    op = "low_rank_maps"
    if not isinstance(maps, Sequence) or not all(isinstance(m, LowRankMap) for m in maps):
        kind = type(maps).__name__
        raise TypeError(f"{op}: maps is a {kind}; accepted is a sequence with LowRankMap alone")
    if not 1 <= len(maps) <= len(RANKS):
        raise ValueError(f"{op}: {len(maps)} maps; accepted are 1 to {len(RANKS)}")
    axes: dict[str, str] = {}
    given: dict[str, Any] = {}
    for i, (one, rank) in enumerate(zip(maps, RANKS, strict=False)):
        check.choice(op, f"maps[{i}].activation", one.activation, ACTIVATIONS)
        for (name, array), own in zip(
            one._asdict().items(), ("BTC", f"C{rank}", f"{rank}D", "D"), strict=False
        ):
            if array is not None:
                axes[f"maps[{i}].{name}"], given[f"maps[{i}].{name}"] = own, array
    arrays = iter(_products.checked(op, axes, given, implementation))
    check.share_dtype(op, {name: x for name, x in given.items() if name.endswith(".x")})
    return [_Map(*(x if x is None else next(arrays) for x in one[:4])) for one in maps]


class _Map(NamedTuple):
    """The arrays of a map, or what there is of each of them."""

    x: Any
    first: Any
    second: Any
    offset: Any


def _rounded(x: Array, *parameters: Array | None) -> _Map:
    """A map with parameters in the dtype of `x`."""
    return _Map(x, *(p if p is None else p.astype(x.dtype) for p in parameters))


Maps: TypeAlias = tuple[_Map, ...]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _run(several: "_LowRankMaps", options: Options, maps: Maps) -> tuple[Array, ...]:
    """For each map the result of its activation, and y."""
    return run(several, "forward", options, maps)


@_run.defjvp
def _(
    several: "_LowRankMaps", options: Options, primals: tuple[Maps], tangents: tuple[Maps]
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    found = _run(several, options, *primals)
    results, derivatives = [], []
    pairs = zip(found[::2], found[1::2], strict=True)
    for activation, own, d, (hidden, y) in zip(
        several.activations, *primals, *tangents, pairs, strict=True
    ):
        hidden = checkpoint_name(hidden, PRODUCT)
        slope = SLOPES[activation](hidden.astype(jnp.float32))
        dproduct = by_input(d.x, own.first) + by_input(own.x, d.first)
        dhidden = (slope * dproduct.astype(jnp.float32)).astype(hidden.dtype)
        dy = by_input(dhidden, own.second) + by_input(hidden, d.second)
        results += [hidden, y]
        derivatives += [dhidden, _with_offset(dy, d.offset)]
    return tuple(results), tuple(derivatives)


@dataclass(frozen=True)
class _LowRankMaps(Products):
    """The kernels of several maps, with the activation of each. Channels of a mesh that distributes
    them are gathered (D)."""

    activations: tuple[str, ...]
    name = "low_rank_maps"

    def axes(self, name: Pass, options: Options, operands: Maps) -> tuple[Maps, tuple[str, ...]]:
        ranks = RANKS[: len(operands)]
        maps = (
            _Map("BTD", f"D{rank}", f"{rank}D", None if one.offset is None else "D")
            for rank, one in zip(ranks, operands, strict=True)
        )
        return tuple(maps), tuple(x for rank in ranks for x in (f"BT{rank}", "BTD"))

    def why_no_kernel(self, name: Pass, options: Options, operands: Maps) -> str | None:
        x, ranks = operands[0].x, [one.first.shape[-1] for one in operands]
        if (outputs := operands[0].second.shape[1]) != x.shape[-1]:
            return f"C = {x.shape[-1]} and D = {outputs}; the cuda kernels take C = D"
        sizes = [Size("C =", x.shape[-1], RANK_MULTIPLE, MAX_WIDTH)]
        sizes += [Size("a rank is", rank, RANK_MULTIPLE, MAX_RANK) for rank in ranks]
        return _products.why_not(options, x, sizes, MIN_TOKENS, MAX_TOKENS)

    def formula(self, name: Pass, options: Options, operands: Maps) -> tuple[Array, ...]:
        found = []
        for activation, one in zip(self.activations, operands, strict=True):
            hidden = ACTIVATIONS[activation](by_input(one.x, one.first))
            found += [hidden, _with_offset(by_input(hidden, one.second), one.offset)]
        return tuple(found)

    def kernel(self, name: Pass, options: Options, operands: Maps) -> tuple[Array, ...]:
        """The maps on one device."""
        given, results = [], []
        for one in operands:
            nothing = jnp.zeros(0, one.x.dtype)
            given += [*one[:3], nothing if one.offset is None else one.offset]
            hidden = (*one.x.shape[:2], one.first.shape[-1])
            results += [(hidden, one.x.dtype), (one.x.shape, one.x.dtype)]
        kinds = tuple(ACTIVATIONS)
        digits = (kinds.index(x) * len(kinds) ** i for i, x in enumerate(self.activations))
        return library.call(TARGET, results, *given, activations=sum(digits))


def _with_offset(x: Array, offset: Array | None) -> Array:
    """The sum in float32, in which its derivative then adds up the gradient of the offset."""
    if offset is None:
        return x
    return (x.astype(jnp.float32) + offset.astype(jnp.float32)[None, None]).astype(x.dtype)
