"""The sizes of a model."""

import dataclasses


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
        for name, size in dataclasses.asdict(self).items():
            if size < 1:
                raise ValueError(f"rwkv7: {name} is {size}; accepted is a positive integer")
        if self.width % self.head_size:
            raise ValueError(
                f"rwkv7: width is {self.width}; accepted is a multiple of head_size = "
                f"{self.head_size}"
            )
