"""The operands of WKV6."""

from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.decay import NO_DECAY

SIGNATURE = Signature(
    "wkv6",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    idle={"w": NO_DECAY},
    decays=("log", "exp"),
)
