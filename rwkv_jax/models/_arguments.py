"""What the functions of a model check before they compute anything.

As in operators, a message names the function and the argument, what was given and what is accepted;
a wrong shape or value raises ValueError, a wrong type or dtype TypeError, and nothing is cast.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, core
from jax.typing import DTypeLike

from rwkv_jax._operator import check
from rwkv_jax._packing import segments
from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints.tensors import described, listed, quoted
from rwkv_jax.models._deferral import flush
from rwkv_jax.models._stacking import Stacked


def check_tokens(
    what: str, tokens: Any, vocabulary: int, layouts: Mapping[int, str] | None = None
) -> None:
    """Raise an error unless `tokens` are integers with one of the numbers of axes in `layouts`, and
    below `vocabulary` where their values are known, which they are not inside `jit`."""
    layouts = layouts or {2: "[B, T]", 1: "[B]"}
    check.array(what, "tokens", tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise TypeError(f"{what}: tokens is {tokens.dtype}; accepted are integers")
    if tokens.ndim not in layouts:
        accepted = " or ".join(layouts.values())
        raise ValueError(f"{what}: tokens has shape {tokens.shape}; accepted is {accepted}")
    if isinstance(tokens, core.Tracer) or tokens.size == 0:
        return
    if isinstance(tokens, jax.Array) and not tokens.is_fully_addressable:
        return
    values = np.asarray(tokens)
    if values.min() < 0 or values.max() >= vocabulary:
        wrong = values.min() if values.min() < 0 else values.max()
        raise ValueError(
            f"{what}: tokens has {wrong}; accepted are integers from 0 to {vocabulary - 1}"
        )


def checked_segment_ids(what: str, ids: Any, shape: tuple[int, ...]) -> Array | None:
    """The segments of tokens of `shape`, [B, T] for sequences and [B] for a single token each."""
    return None if ids is None else segments.checked(what, ids, *shape)


def check_state(
    what: str, initial: Callable[..., Any], params: Any, state: Any, batch: int, dtype: DTypeLike
) -> None:
    """Raise an error unless `state` is None or like `initial(params, batch, dtype)`. The message
    lists the arrays that differ."""
    if state is None:
        return
    is_stacked = isinstance(params.blocks, Stacked)
    if is_stacked and not isinstance(state, Stacked):
        raise ValueError(
            f"{what}: state is a {type(state).__name__}; accepted with stacked blocks is Stacked"
        )
    if isinstance(state, Stacked) and not is_stacked:
        raise ValueError(f"{what}: state is Stacked; accepted with a tuple of blocks is a tuple")
    if is_stacked:
        like = jax.eval_shape(lambda params: initial(params, batch, dtype), params)
    else:
        # The states of all blocks are alike.
        few = params._replace(blocks=params.blocks[:1])
        like = jax.eval_shape(lambda few: initial(few, batch, dtype), few) * len(params.blocks)
    expected: dict[str, Any] = _parameters.names(like)
    given: dict[str, Any] = _parameters.names(flush(state))
    if wrong := list(differences(expected, given)):
        same = expected.keys() == given.keys()
        shapes = same and all(np.shape(given[name]) == x.shape for name, x in expected.items())
        rows = "one row" if isinstance(batch, int) and batch == 1 else f"{batch} rows"
        raise (TypeError if shapes else ValueError)(
            f"{what}: state is not one of this model with {rows} and {jnp.dtype(dtype)} "
            f"activations:{listed(wrong)}"
        )


def differences(expected: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with each array of a state, or of another tree, by its name."""
    for name, x in expected.items():
        wanted = f"{described(x.shape)} in {x.dtype}"
        if name not in given:
            yield f"{name} is missing; expected is {wanted}"
        elif not hasattr(given[name], "dtype"):
            yield f"{name} is a {type(given[name]).__name__}; expected is {wanted}"
        elif (given[name].shape, given[name].dtype) != (x.shape, x.dtype):
            other = f"{described(given[name].shape)} in {given[name].dtype}"
            yield f"{name} is {other}; expected is {wanted}"
    for name in sorted(given.keys() - expected.keys()):
        yield f"{quoted(name)} is expected nowhere"
