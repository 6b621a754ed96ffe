"""Options of XLA that scripts/test.sh sets to compile less, and how a program goes without them."""

import os
from typing import Any

_EMITTERS = "xla_cpu_use_fusion_emitters"
AS_USERS: Any = {_EMITTERS: True} if _EMITTERS in os.environ.get("XLA_FLAGS", "") else None
"""The `compiler_options` of programs of which a test asks for more than a test of others: with the
flags of scripts/test.sh the bits of results depend on shapes, and on some CPUs the gradients of a
model in float32 have errors of 2e-5."""
