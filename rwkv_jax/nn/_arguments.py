"""What the models of both frameworks check."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import jax

from rwkv_jax.models import _parameters
from rwkv_jax.models._checkpoints.layouts import layout_of, sizes
from rwkv_jax.models._generations import generation_of
from rwkv_jax.models._model import Generation
from rwkv_jax.models._trees import Params, unstacked


def of_model(config: Any, params: Any, **source: Any) -> tuple[Generation, Params]:
    """The generation of `config` and `params`, or new parameters from the key that `source` has by
    the name of the argument that gave it.

    Raises:
      TypeError: `config` is of no generation, or `params` of another one; or there are neither
        parameters nor a key, or both.
      ValueError: `params` have other sizes than `config`.
    """
    generation = generation_of(config)
    key = _key("RWKV", params, source)
    if params is None:
        return generation, generation.init(key, config)
    params = generation.checked(params)
    arrays = _parameters.names(jax.eval_shape(unstacked, params))
    shapes = {name: x.shape for name, x in arrays.items()}
    found = generation.config(**sizes("RWKV: params", layout_of("RWKV: params", arrays), shapes))
    if found != config:
        raise ValueError(f"RWKV: config is {config}; accepted with these params is {found}")
    return generation, params


def of_layer(layer: str, module: ModuleType, config: Any, params: Any, **source: Any) -> Any:
    """The checked parameters of a layer of `rwkv_jax.layers`, whose module is `module`, or new ones
    from the key that `source` has by the name of the argument that gave it.

    Raises:
      TypeError: `config` is of another layer; or there are neither parameters nor a key, or both.
      ValueError: `params` have other names or shapes than those of `config`.
    """
    if not isinstance(config, module.Config):
        accepted = f"{module.__name__.rpartition('.')[2]}.Config"
        raise TypeError(f"{layer}: config is a {type(config).__name__}; accepted is a {accepted}")
    key = _key(layer, params, source)
    if params is None:
        return module.init(key, config)
    return module.checked(_parameters.arrays(params), config)


def _key(layer: str, params: Any, source: Mapping[str, Any]) -> Any:
    ((name, key),) = source.items()
    if (params is None) == (key is None):
        given = "None" if params is None else "given"
        raise TypeError(f"{layer}: params and {name} are {given}; accepted is one of them")
    return key
