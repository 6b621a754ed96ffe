"""How a time mixing calls its operator: the options, and one way for sequences and tokens."""

from typing import Any, NamedTuple

from jax import Array
from jaxtyping import Int

from rwkv_jax.models._kernels import Kernels, Wkv


class Options(NamedTuple):
    """The options of a model: the documents of a row, and what `Kernels.of_call` gives."""

    segment_ids: Int[Array, " B *T"] | None
    kernels: Kernels


def run(
    operator: Wkv,
    step: Wkv,
    options: Options,
    single: bool,
    operands: tuple[Array, ...],
    state: Any,
    decay: str,
) -> tuple[Array, Any]:
    """`operator`, or what `options` have in its place, on sequences, or `step` on a `single` token
    of each row."""
    # A function given as `wkv` need not know of segments where there are none.
    ids, kernels = options
    segments = {}
    if ids is not None:
        segments = {"active": ids != 0} if single else {"segment_ids": ids}
    call = step if single else kernels.wkv or operator
    return call(*operands, state, decay=decay, implementation=kernels.operator, **segments)
