"""The operator WKV5: its operands and its implementations."""

from rwkv_jax._linear_attention.recurrence import operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.decay import NO_DECAY

SIGNATURE = Signature(
    "wkv5",
    inputs={"r": "BTHK", "w": "HK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    identity_token={"w": NO_DECAY},
    decays=("log", "exp"),
    per_head=frozenset("wu"),
)

OPERATOR = operator(SIGNATURE)
