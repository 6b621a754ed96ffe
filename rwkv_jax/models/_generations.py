"""The generations of models that there are."""

from typing import Any

from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._model import Generation

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
