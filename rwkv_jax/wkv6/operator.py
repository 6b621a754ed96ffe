"""The operator WKV6: its operands and its implementations."""

from rwkv_jax._linear_attention.recurrence import operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.decay import NO_DECAY

SIGNATURE = Signature(
    "wkv6",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    identity_token={"w": NO_DECAY},
    decays=("log", "exp"),
)

OPERATOR = operator(SIGNATURE)
