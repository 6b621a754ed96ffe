"""Which kernels compute a model, and how a time mixing calls its operator."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax._operator import check

Wkv: TypeAlias = Callable[..., tuple[Array, Any]]
"""A function with the arguments and results of an operator, such as `sharding.shard(wkv7, ...)`."""


_FUNCTIONS = ("wkv", "gather", "embed", "total")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels compute a model. None leaves the choice to the library.

    Functions that take it as `kernels` also take a name: "xla" and "reference" are `operator` and
    `layers` of this name with separate blocks, and "fused" is fused blocks.

    Attributes:
      operator: the implementation of the operator, which a function given as `wkv` takes too.
      layers: the implementation of the functions of `rwkv_jax.layers`: "ffi", "xla" or "reference".
      blocks: with one token each, "fused" computes each block of RWKV-7 in a few CUDA kernels for
        up to 32 rows, and for up to 1024 of bfloat16 on GPUs of compute capability 9.0. "separate"
        never does. None does so on CUDA for one row, and for several of bfloat16 or float16, where
        the kernels can run, the program is for one device, the parameters are not stacked, and
        `operator` and `layers` are None. With "fused" these two are None or "ffi".
      wkv: the function that mixes sequences, such as `sharding.shard(wkv7, ...)`, in place of the
        operator of the model.
      gather: a function that a block begins with. It takes the parameters of the block, its input
        and, but for the first block, what the first one has for all others, and returns all three
        for the block to compute with. With `recompute` the backward pass calls it again. So it can
        gather the parameters of one block at a time.
      embed: a function of the weight of the embedding, tokens and the dtype of the activations that
        returns the embedding of the tokens, in place of a look-up.
      total: a function of the output of a mixing that returns what a block adds to its input. So
        the devices of a `shard_map`, of which each has some heads and inner channels of RWKV-7, can
        sum their outputs. Blocks are then separate.

    Raises:
      ValueError: `layers` or `blocks` is none of the names, or there are `total` and fused blocks.
      TypeError: `wkv`, `gather`, `embed` or `total` is no function.
    """

    operator: str | None = None
    layers: str | None = None
    blocks: str | None = None
    wkv: Wkv | None = None
    gather: Callable[..., Any] | None = None
    embed: Callable[..., Array] | None = None
    total: Callable[[Array], Array] | None = None

    def __post_init__(self) -> None:
        names = {"layers": ("ffi", "xla", "reference"), "blocks": ("fused", "separate")}
        for name, accepted in names.items():
            if (value := getattr(self, name)) is not None:
                check.choice("Kernels", name, value, accepted)
        for name in _FUNCTIONS:
            if (value := getattr(self, name)) is not None and not callable(value):
                raise TypeError(f"Kernels: {name} is {value!r}; accepted are None and a function")
        if self.total is not None and self.blocks == "fused":
            raise ValueError("Kernels: total is a function; accepted with fused blocks is None")

    @property
    def may_fuse(self) -> bool:
        """Whether one token each may go through fused blocks, where there are any."""
        separate = self.blocks or self.operator or self.layers or self.total
        return self.blocks == "fused" or not separate

    def of_call(self, what: str, shape: tuple[Any, ...], has_fused: bool) -> "Kernels":
        """Those for tokens of `shape`, [B, T] or [B], of which `blocks` is None only where they may
        be fused. With symbolic sizes, in a program to be exported, all others but the reference
        need numbers.

        Raises:
          ValueError: the call has no such kernels.
        """
        if not all(isinstance(size, int) for size in shape):
            functions = {name: getattr(self, name) for name in _FUNCTIONS}
            found = dataclasses.replace(_NAMED["reference"], **functions)
            if any(x not in (None, getattr(found, name)) for name, x in vars(self).items()):
                raise ValueError(
                    f"{what}: kernels is {self} and tokens has the symbolic shape {shape}; "
                    "accepted for it are None and 'reference'"
                )
            return found
        single = len(shape) == 1
        if self.blocks == "fused" and not (has_fused and single):
            accepted = "one token each, [B]" if has_fused else "whole models of RWKV-7 alone"
            raise ValueError(
                f"{what}: kernels has blocks = 'fused' where tokens has shape {shape}; accepted "
                f"for {accepted}"
            )
        blocks = self.blocks if has_fused and single and self.may_fuse else "separate"
        # A token has no run of tokens over which kernels could go.
        layers = "reference" if single else self.layers
        return dataclasses.replace(self, layers=layers, blocks=blocks)


_NAMED: dict[str | None, Kernels] = {
    None: Kernels(),
    "xla": Kernels("xla", "xla", "separate"),
    "reference": Kernels("reference", "reference", "separate"),
    "fused": Kernels(blocks="fused"),
}


def chosen(what: str, kernels: Kernels | str | None) -> Kernels:
    """What `kernels` stands for, an argument of `what`.

    Raises:
      TypeError, ValueError: it is not accepted.
    """
    if isinstance(kernels, str | None) and kernels in _NAMED:
        return _NAMED[kernels]
    if not isinstance(kernels, Kernels):
        raise (ValueError if isinstance(kernels, str) else TypeError)(
            f"{what}: kernels is {kernels!r}; accepted are {', '.join(map(repr, _NAMED))} and a "
            "models.Kernels"
        )
    if kernels.blocks == "fused" and not {kernels.operator, kernels.layers} <= {None, "ffi"}:
        raise ValueError(
            f"{what}: kernels is {kernels}; accepted as operator and layers of fused blocks, which "
            "have their own, are None and 'ffi'"
        )
    return kernels


class Tokens(NamedTuple):
    """The tokens of a call, and the input of the first block, which is made of them alone."""

    ids: Int[Array, " B *T"]
    embedded: Float[Array, "B *T C"]


class Options(NamedTuple):
    """The options of a model: the documents of a row, what `Kernels.of_call` gives, and the tokens,
    if blocks look up tables by token."""

    segment_ids: Int[Array, " B *T"] | None
    kernels: Kernels
    tokens: Tokens | None = None


def run(
    operator: Wkv, step: Wkv, options: Options, single: bool, operands: tuple[Any, ...], decay: str
) -> tuple[Array, Any]:
    """`operator`, or what `options` have in its place, on sequences, or `step` on a `single` token
    of each row. The last of the operands is the state."""
    # A function given as `wkv` need not know of segments where there are none.
    ids, kernels = options.segment_ids, options.kernels
    segments = {}
    if ids is not None:
        segments = {"active": ids != 0} if single else {"segment_ids": ids}
    call = step if single else kernels.wkv or operator
    return call(*operands, decay=decay, implementation=kernels.operator, **segments)
