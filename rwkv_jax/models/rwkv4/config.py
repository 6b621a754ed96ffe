"""The sizes of a model."""

import dataclasses

from rwkv_jax.models._config import check_sizes


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      layers: number of blocks.
      width: channels of the activations (C).
      vocabulary: number of different tokens.

    Raises:
      ValueError: a size is not positive.
    """

    layers: int
    width: int
    vocabulary: int = 50277

    def __post_init__(self):
        check_sizes("rwkv4", dataclasses.asdict(self))
