"""The operands of WKV6."""

from rwkv_jax._operator.signature import Signature

SIGNATURE = Signature(
    "wkv6",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    decays=("log", "exp"),
)
