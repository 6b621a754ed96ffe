"""The operands of WKV5."""

from rwkv_jax._operator.signature import Signature

SIGNATURE = Signature(
    "wkv5",
    inputs={"r": "BTHK", "w": "HK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    decays=("log", "exp"),
    per_head=frozenset("wu"),
)
