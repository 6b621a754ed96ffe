"""The operands of WKV4."""

from typing import NamedTuple

from rwkv_jax._operator.signature import Signature
from rwkv_jax._typing import Operand

NOTHING = -1e38
"""The `log_max` of a state before any token."""


class Wkv4State(NamedTuple):
    """The sums over past tokens of weights times values, `num * exp(log_max)`, and of weights,
    `den * exp(log_max)`; `log_max` is the log of the largest weight. Each is [B, C] in float32."""

    num: Operand
    den: Operand
    log_max: Operand


SIGNATURE = Signature(
    "wkv4",
    inputs={"w": "C", "u": "C", "k": "BTC", "v": "BTC"},
    y="v",
    state={"num": "BC", "den": "BC", "log_max": "BC"},
    decays=("log", "exp"),
    state_type=Wkv4State,
    empty={"log_max": NOTHING},
    float32_checkpoints=True,
)
