"""The generations of models that there are."""

from typing import Any

from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._model import Generation
from rwkv_jax.models._trees import Params, first_block

GENERATIONS = (rwkv4.GENERATION, rwkv5.GENERATION, rwkv6.GENERATION, rwkv7.GENERATION)


def generation_of(config: Any) -> Generation:
    """The generation whose `Config` this is.

    Raises:
      TypeError: it is of none.
    """
    for generation in GENERATIONS:
        if isinstance(config, generation.config):
            return generation
    accepted = ", ".join(f"{generation.name}.Config" for generation in GENERATIONS)
    raise TypeError(f"config is a {type(config).__name__}; accepted are {accepted}")


def generation_of_params(what: str, params: Any) -> Generation:
    """The generation whose parameters these are, in either form.

    Raises:
      TypeError: they are of none. The message begins with `what`.
    """
    if isinstance(params, Params):
        for generation in GENERATIONS:
            if isinstance(first_block(params).att, generation.time_mix_params):
                return generation
    raise TypeError(
        f"{what}: params is a {type(params).__name__}; accepted is a Params of rwkv_jax.models"
    )
