"""The operands of WKV7."""

from rwkv_jax._operator.signature import Signature

SIGNATURE = Signature(
    "wkv7",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "a": "BTHK", "b": "BTHK"},
    y="v",
    state={"state": "BHVK"},
    decays=("log", "exp", "sigmoid"),
)
