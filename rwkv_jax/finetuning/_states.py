"""State tuning: the states before the first token as parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float32

from rwkv_jax._operator import check
from rwkv_jax.models._checkpoints.tensors import described
from rwkv_jax.models._generations import generation_of_params
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._trees import BlockState, State, stacked, unstacked


def initial_states(params: Any, state: State | None = None) -> dict[str, Float32[Array, "H V K"]]:
    """Trainable states of the operators of all layers before the first token, by the names of the
    official file: `blocks.0.att.time_state` [H, V, K] float32 and so on.

    Args:
      params: the parameters of a model of RWKV-5 to 7, in either form.
      state: what they are at first: a state of one row, such as `models.load_state` gives; zeros if
        None.

    Raises:
      TypeError: `params` are not the parameters of a model, or `state` is no state of one.
      ValueError: they are of RWKV-4, whose state is no matrix, or `state` is not one of one row of
        this model.
    """
    what = "initial_states"
    sizes = _sizes(what, params)
    if state is None:
        return {name: jnp.zeros(size, jnp.float32) for name, size in sizes.items()}
    blocks = unstacked(state) if isinstance(state, tuple) else ()
    if not blocks or not all(isinstance(block, BlockState) for block in blocks):
        raise TypeError(
            f"{what}: state is a {type(state).__name__}; accepted is a State, such as "
            "models.load_state gives"
        )
    found = {_name(i): block.att.wkv for i, block in enumerate(blocks)}
    wanted = {name: (1, *size) for name, size in sizes.items()}
    _check(what, "state", found, wanted)
    # Copies, which a training step may donate.
    return {name: jnp.array(x[0], jnp.float32) for name, x in found.items()}


def state_of(
    params: Any, states: Mapping[str, Array], batch: int = 1, *, dtype: DTypeLike = jnp.float32
) -> State:
    """The state of a model with tuned states in place of zeros, and with the zeros of
    `initial_state` in the token shifts. `models.save_state` writes that of one row.

    Call it inside the function that is differentiated with respect to `states`. Where a row has
    several documents by `segment_ids`, only the first one starts from the state.

    Args:
      params: the parameters of the model, in either form.
      states: as `initial_states` gives them.
      batch: the number of rows, which all start with the same state.
      dtype: the dtype of the activations.

    Returns:
      The state, in the form of `params`.

    Raises:
      TypeError, ValueError: as `initial_states` and `initial_state` raise them.
    """
    what = "state_of"
    _check(what, "states", states, _sizes(what, params))
    generation = generation_of_params(what, params)
    state = unstacked(generation.initial_state(params, batch, dtype))

    def tuned(block: Any, x: Array) -> Any:
        rows = jnp.broadcast_to(x.astype(jnp.float32), (batch, *x.shape))
        return block._replace(att=block.att._replace(wkv=rows))

    blocks = tuple(tuned(block, states[_name(i)]) for i, block in enumerate(state))
    return stacked(blocks) if isinstance(params.blocks, Stacked) else blocks


def average(
    states: Sequence[Mapping[str, Array]], weights: Sequence[float] | None = None
) -> dict[str, Array]:
    """The weighted average of several tuned states, sum_i w_i S_i / sum_i w_i.

    Args:
      states: each as `initial_states` gives it, of the same model.
      weights: a number for each; all the same if None.

    Raises:
      ValueError: there are no states, other names or shapes in one than in the first, or another
        number of weights; or the weights have the sum 0.
      TypeError: a weight is no number.
    """
    what = "average"
    if not states:
        raise ValueError(f"{what}: states is empty; accepted are one or more")
    sizes = {name: x.shape for name, x in states[0].items()}
    for i, each in enumerate(states):
        _check(what, f"states[{i}]", each, sizes)
    weights = [1.0] * len(states) if weights is None else weights
    if len(weights) != len(states):
        raise ValueError(
            f"{what}: weights has {len(weights)} numbers; accepted are {len(states)}, one for each "
            "of states"
        )
    factors = np.array([check.real(what, "a weight", w) for w in weights])
    if factors.sum() == 0:
        raise ValueError(f"{what}: the sum of weights is 0; accepted is another one")
    factors = (factors / factors.sum()).tolist()
    return {
        name: jax.tree.reduce(jnp.add, [w * x[name] for w, x in zip(factors, states, strict=True)])
        for name in sizes
    }


def _name(layer: int) -> str:
    return f"blocks.{layer}.att.time_state"


def _sizes(what: str, params: Any) -> dict[str, tuple[int, ...]]:
    """The shapes of the states of a model by their names."""
    generation = generation_of_params(what, params)
    blocks = jax.eval_shape(lambda p: unstacked(generation.initial_state(p, 1)), params)
    sizes = {_name(i): getattr(block.att.wkv, "shape", ()) for i, block in enumerate(blocks)}
    if any(len(size) != 4 for size in sizes.values()):
        raise ValueError(
            f"{what}: params is of {generation.name}; accepted is one whose state is a matrix for "
            "each head"
        )
    return {name: size[1:] for name, size in sizes.items()}


def _check(
    what: str, argument: str, given: Mapping[str, Array], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise an error unless there are states of these names and shapes."""
    for name in [*wanted, *given]:
        if name not in given or name not in wanted or given[name].shape != wanted[name]:
            found = described(given[name].shape) if name in given else "missing"
            accepted = described(wanted[name]) if name in wanted else "no state of this name"
            raise ValueError(f"{what}: {argument} has {name} {found}; accepted is {accepted}")
