"""The stacked form of parameters and states."""

from typing import overload

from rwkv_jax.models import _stacking
from rwkv_jax.models.rwkv7.parameters import Params
from rwkv_jax.models.rwkv7.state import State


@overload
def stacked(tree: Params) -> Params: ...
@overload
def stacked(tree: State) -> State: ...
def stacked(tree: Params | State) -> Params | State:
    """Parameters or a state in stacked form: `Stacked` in place of the tuple of blocks.

    The model then goes through its blocks in a `lax.scan`, so that the size of the compiled program
    and the time to compile it do not depend on the number of blocks. Results are the same. The
    state of the model has the form of its parameters.

    Gradients, and the moments of an optimizer, are trees with the form of the parameters. The names
    of arrays begin with `blocks.first.` and `blocks.rest.`; only `unstacked` gives official names.
    """
    if isinstance(tree, Params):
        return tree._replace(blocks=_stacking.stack(tree.blocks))
    return _stacking.stack(tree)


@overload
def unstacked(tree: Params) -> Params: ...
@overload
def unstacked(tree: State) -> State: ...
def unstacked(tree: Params | State) -> Params | State:
    """The inverse of `stacked`: a tuple of blocks."""
    if isinstance(tree, Params):
        return tree._replace(blocks=_stacking.unstack(tree.blocks))
    return _stacking.unstack(tree)
