"""Sessions on disk."""

import functools
import os
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rwkv_jax import _files
from rwkv_jax._operator import check
from rwkv_jax.generation._session import Model, Session, started
from rwkv_jax.models import _parameters
from rwkv_jax.models._arguments import differences
from rwkv_jax.models._checkpoints import safetensors
from rwkv_jax.models._checkpoints.tensors import Allowance, listed, mapped
from rwkv_jax.models._checkpoints.writing import Stored, check_target
from rwkv_jax.models._invariant import Invariant, of_module
from rwkv_jax.models._parameters import names
from rwkv_jax.models._stacking import stack, unstack


def save(path: str | os.PathLike[str], session: Session) -> None:
    """Write a session, which `load` gives back bit for bit.

    An existing file is replaced when the new one is complete.

    Args:
      path: a `.safetensors` file.
      session: the session.

    Raises:
      ValueError: `path` does not end in `.safetensors`.
      TypeError: `session` is no session, or has something else than arrays.
      RuntimeError: the session is distributed over several processes.
    """
    path = _files.expanded(path)
    check_target("save: path", path, (".safetensors",))
    if not isinstance(session, Session):
        raise TypeError(f"save: session is a {type(session).__name__}; accepted is a Session")
    for name, x in names(session).items():
        check.array("save", name, x)
    arrays = names(session._replace(state=unstack(session.state)))
    safetensors.write(path, {name: Stored(x, x.shape) for name, x in arrays.items()})


def load(
    path: str | os.PathLike[str],
    module: ModuleType | Invariant,
    params: Any,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Session:
    """A session that `save` has written, for the same parameters.

    Nothing in the file is trusted. It cannot be told from it whether it is of these parameters or
    of others with the same sizes.

    Args:
      path: the file.
      module: the module of the model, or a `models.Invariant` of it.
      params: the parameters, in either form.
      dtype: the dtype of the activations, with which the session was made.

    Returns:
      The session, whose state has the form of `params`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged; or arrays are missing, of no use, or have another shape or
        dtype than a session of this model, all of which the message lists.
      TypeError: `dtype` is no dtype that activations can have, or `params` are not those of a model
        of `module`.
    """
    path = _files.expanded(path)
    tensors = safetensors.read(mapped(path), str(path), Allowance())
    found = {name: x.array for name, x in tensors.items()}
    positions = found.get("positions", np.zeros(1, np.int32))
    batch = max(len(positions), 1) if positions.ndim == 1 else 1
    params = of_module("load", module).checked(params)
    model = Model(module, _parameters.floating("load", dtype))
    expected = jax.eval_shape(functools.partial(started, model, batch=batch), params)
    form = jax.tree.structure(expected.state)
    in_turn = jax.eval_shape(lambda x: x._replace(state=unstack(x.state)), expected)
    if wrong := list(differences(names(in_turn), found)):
        raise ValueError(
            f"{path}: {len(wrong)} arrays are not those of a session of this model with {batch} "
            f"rows and {model.dtype} activations:{listed(wrong)}"
        )

    def placed(key: Any, _: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(np.array(found[_parameters.name(key)]))

    session = jax.tree_util.tree_map_with_path(placed, in_turn)
    if min(session.positions.min(), session.seeds.min()) < 0:
        raise ValueError(f"{path}: positions and seeds have a negative number")
    is_in_turn = form == jax.tree.structure(session.state)
    return session if is_in_turn else session._replace(state=stack(session.state))
