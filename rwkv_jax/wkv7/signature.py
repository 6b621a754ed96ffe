"""The operands of WKV7."""

from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.decay import NO_DECAY

SIGNATURE = Signature(
    "wkv7",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTHK", "b": "BTHK"},
    y="v",
    state={"state": "BHVK"},
    idle={"w": NO_DECAY},
    decays=("log", "exp", "sigmoid"),
)
