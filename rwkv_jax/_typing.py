"""Axis letters and array types.

B  batch: independent sequences          K  key channels of a head
T  time: tokens                          V  value channels of a head
H  heads                                 N  saved chunk boundaries
C  channels, of operators without heads
"""

from typing import TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Float, Float32

Operand: TypeAlias = jax.Array | np.ndarray
"""What a public function takes; `_check` says which shapes and dtypes it accepts."""

Keys: TypeAlias = Float[Array, "B T H K"]
Values: TypeAlias = Float[Array, "B T H V"]
State: TypeAlias = Float32[Array, "B H V K"]
States: TypeAlias = Float[Array, "B N H V K"]

TokenKeys: TypeAlias = Float[Array, "B H K"]
TokenValues: TypeAlias = Float[Array, "B H V"]
