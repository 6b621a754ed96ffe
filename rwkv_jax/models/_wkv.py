"""How a time mixing calls its operator: the options, and one way for sequences and tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jax import Array
from jaxtyping import Float, Int

Wkv: TypeAlias = Callable[..., tuple[Array, Any]]
"""A function with the arguments and results of an operator, such as `sharding.shard(wkv7, ...)`."""


class Options(NamedTuple):
    """The options of a model: the documents of a row, the implementation of the operator, that of
    the functions of `rwkv_jax.layers`, and the operator for sequences."""

    segment_ids: Int[Array, " B *T"] | None
    implementation: str | None
    layers: str | None
    wkv: Wkv

    def layers_for(self, x: Float[Array, "B *T C"]) -> str | None:
        """The implementation of the functions of `rwkv_jax.layers` for `x`."""
        # A token has no run of tokens over which kernels could go.
        return self.layers if x.ndim == 3 else "reference"


def run(
    step: Wkv, options: Options, single: bool, operands: tuple[Array, ...], state: Any, decay: str
) -> tuple[Array, Any]:
    """The operator of `options` on sequences, or `step` on a `single` token of each row."""
    # A function given as `wkv` need not know of segments where there are none.
    ids = options.segment_ids
    segments = {}
    if ids is not None:
        segments = {"active": ids != 0} if single else {"segment_ids": ids}
    call = step if single else options.wkv
    return call(*operands, state, decay=decay, implementation=options.implementation, **segments)
