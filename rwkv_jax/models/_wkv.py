"""How a time mixing calls its operator: the options, and one way for sequences and tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from jax import Array
from jaxtyping import Float, Int

from rwkv_jax._operator.public import passing

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
    return run_passing(step, options, single, operands, state, decay)[0]


def run_passing(
    step: Wkv, options: Options, single: bool, operands: tuple[Array, ...], state: Any, decay: str
) -> tuple[tuple[Array, Any], dict[str, Array]]:
    """`run`, and operands for another use, by name: the backward pass of the operator adds the
    cotangents from there. There are none where `options` have a function of the caller's."""
    # A function given as `wkv` need not know of segments where there are none.
    ids = options.segment_ids
    segments = {} if ids is None else {"segment_ids": ids}
    return passing(
        *(step if single else options.wkv, *operands, state),
        decay=decay,
        implementation=options.implementation,
        **segments,
    )
