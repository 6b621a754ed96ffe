"""What an operator with one state [V, K] for each head says of its tokens.

All arrays are in float32: those of tokens [..., T, K], with zeros for tokens that are not there,
and parameters [..., 1, K].
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from jax import Array

from rwkv_jax._operator.call import Arrays


class Read(NamedTuple):
    """What a token reads: the product of a state and `x`.

    after: whether of the state after the token. Otherwise of the one before it.
    now: what meets the columns of the token itself all the same, if `after` is False; None for
      nothing.
    """

    x: Array
    after: bool = False
    now: Array | None = None


class Terms(NamedTuple):
    """reads: for U, if there is one, and for Y.
    columns: the keys under which U, if there is one, and V are written."""

    reads: list[Read]
    columns: list[Array]


TermsFn: TypeAlias = Callable[[Arrays], Terms]
"""`terms(inputs)`: what an operator says, from its inputs by name."""
