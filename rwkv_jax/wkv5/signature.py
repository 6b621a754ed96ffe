"""The operands of WKV5."""

from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.decay import NO_DECAY

SIGNATURE = Signature(
    "wkv5",
    inputs={"r": "BTHK", "w": "HK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    idle={"w": NO_DECAY},
    decays=("log", "exp"),
    per_head=frozenset("wu"),
)
