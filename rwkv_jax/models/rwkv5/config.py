"""The sizes of a model."""

import dataclasses

from rwkv_jax.models._config import check_sizes


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a model.

    Attributes:
      layers: number of blocks.
      width: channels of the activations (C), a multiple of `head_size`.
      head_size: channels of a head (K).
      vocabulary: number of different tokens.

    Raises:
      ValueError: a size is not positive, or `width` is not a multiple of `head_size`.
    """

    layers: int
    width: int
    head_size: int = 64
    vocabulary: int = 65536

    def __post_init__(self):
        check_sizes("rwkv5", dataclasses.asdict(self))
