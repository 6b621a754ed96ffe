"""The operator WKV6: its operands and its implementations."""

from rwkv_jax._linear_attention.recurrence import SUMMARY, step, terms
from rwkv_jax._native.kernels import HEAD_SIZES, NativeKernels
from rwkv_jax._operator.operator import Operator
from rwkv_jax._operator.signature import Signature
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.decay import NO_DECAY
from rwkv_jax._portable.token_by_token import TokenByToken

SIGNATURE = Signature(
    "wkv6",
    inputs={"r": "BTHK", "w": "BTHK", "k": "BTHK", "v": "BTHV", "u": "HK"},
    y="v",
    state={"state": "BHVK"},
    identity_token={"w": NO_DECAY},
    decays=("log", "exp"),
)

OPERATOR = Operator(
    SIGNATURE,
    SUMMARY,
    implementations={
        "ffi": NativeKernels(SIGNATURE, head_sizes=HEAD_SIZES),
        "pallas": "rwkv_jax.wkv6.pallas",
        "xla": Chain(SIGNATURE, terms),
        "reference": TokenByToken(SIGNATURE, step),
    },
)
