"""Which kernels compute a model."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

from jax import Array

from rwkv_jax._operator import check

Wkv: TypeAlias = Callable[..., tuple[Array, Any]]
"""A function with the arguments and results of an operator, such as `sharding.shard(wkv7, ...)`."""

_LAYERS = ("ffi", "xla", "reference")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Which kernels compute a model. None leaves the choice to the library.

    Functions that take it as `kernels` also take a name: "xla" and "reference" are `operator` and
    `layers` of this name with separate blocks, and "fused" is fused blocks.

    Attributes:
      operator: the implementation of the operator, which a function given as `wkv` takes too.
      layers: the implementation of the functions of `rwkv_jax.layers`: "ffi", "xla" or "reference".
        Where tokens of a sequence are distributed over devices, give "xla", which the compiler
        partitions.
      blocks: with one token each, "fused" computes each block of RWKV-7 in a few CUDA kernels for
        up to 32 rows, and for up to 1024 of bfloat16 on GPUs of compute capability 9.0. "separate"
        never does. None does so on CUDA for one row, and for several of bfloat16 or float16, where
        the kernels can run, the program is for one device, the parameters are not stacked, and
        `operator` and `layers` are None. With "fused" these two are None or "ffi".
      wkv: the function that mixes sequences, such as `sharding.shard(wkv7, ...)`, in place of the
        operator of the model.

    Raises:
      TypeError: `operator` is no name, or `wkv` no function.
      ValueError: `layers` or `blocks` is none of the names.
    """

    operator: str | None = None
    layers: str | None = None
    blocks: str | None = None
    wkv: Wkv | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.operator, str | None):
            raise TypeError(f"Kernels: operator is {self.operator!r}; accepted are a name and None")
        if not (self.wkv is None or callable(self.wkv)):
            raise TypeError(f"Kernels: wkv is {self.wkv!r}; accepted are a function and None")
        for name, accepted in {"layers": _LAYERS, "blocks": ("fused", "separate")}.items():
            if (value := getattr(self, name)) is not None:
                check.choice("Kernels", name, value, accepted)

    @property
    def may_fuse(self) -> bool:
        """Whether one token each may go through fused blocks, where there are any."""
        return self.blocks == "fused" or not (self.blocks or self.operator or self.layers)

    def of_call(self, what: str, shape: tuple[Any, ...], *, has_fused: bool) -> "Kernels":
        """Those for tokens of `shape`, [B, T] or [B], by a model whose blocks may be fused or not.
        None as `blocks` then means fused blocks where they can run and are faster.

        Raises:
          ValueError: `blocks` is "fused" where there are no such blocks; or sizes are symbolic, as
            in a program to be exported, and kernels are asked for that need numbers.
        """
        single = len(shape) == 1
        if not all(isinstance(size, int) for size in shape):
            reference = dataclasses.replace(_NAMED["reference"], wkv=self.wkv)
            for name in ("operator", "layers", "blocks"):
                value, accepted = getattr(self, name), getattr(reference, name)
                if value not in (None, accepted):
                    raise ValueError(
                        f"{what}: kernels has {name} = {value!r} and tokens has the symbolic shape "
                        f"{shape}; accepted for it are None and {accepted!r}"
                    )
            return reference
        if self.blocks == "fused" and not (has_fused and single):
            accepted = "one token each, [B]" if has_fused else "whole models of RWKV-7 alone"
            raise ValueError(
                f"{what}: kernels has blocks = 'fused' with tokens of shape {shape}; accepted for "
                + accepted
            )
        return dataclasses.replace(
            self,
            # A token has no run of tokens over which kernels could go.
            layers="reference" if single else self.layers,
            blocks=self.blocks if has_fused and single and self.may_fuse else "separate",
        )


_NAMED: dict[str | None, Kernels] = {
    None: Kernels(),
    "xla": Kernels("xla", "xla", "separate"),
    "reference": Kernels("reference", "reference", "separate"),
    "fused": Kernels(blocks="fused"),
}


def chosen(what: str, kernels: Kernels | str | None) -> Kernels:
    """What `kernels` stands for, an argument of `what`.

    Raises:
      TypeError: it has another type.
      ValueError: it is none of the names, or blocks are to be fused, which have an operator and
        layer functions of their own, with others that are not "ffi".
    """
    if isinstance(kernels, str | None) and kernels in _NAMED:
        return _NAMED[kernels]
    if not isinstance(kernels, Kernels):
        raise (ValueError if isinstance(kernels, str) else TypeError)(
            f"{what}: kernels is {kernels!r}; accepted are {', '.join(map(repr, _NAMED))} and a "
            "models.Kernels"
        )
    for name in ("operator", "layers") if kernels.blocks == "fused" else ():
        if (value := getattr(kernels, name)) not in (None, "ffi"):
            raise ValueError(
                f"{what}: kernels has {name} = {value!r} with blocks = 'fused', which have their "
                "own; accepted are None and 'ffi'"
            )
    return kernels
