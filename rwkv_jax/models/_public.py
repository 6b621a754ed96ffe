"""What the modules of all generations have in common for callers. They import all of it by `*`, and
`__all__` is the only list of these names."""

from rwkv_jax.models._kernels import Wkv
from rwkv_jax.models._linear import Weight
from rwkv_jax.models._normalisation import Norm, layer_norm
from rwkv_jax.models._parameters import names
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._stacking import Stacked
from rwkv_jax.models._training import learning_rates, weight_decays
from rwkv_jax.models._trees import (
    BlockParams,
    BlockState,
    Params,
    State,
    TimeMixState,
    stacked,
    unstacked,
)

__all__ = [
    "BlockParams",
    "BlockState",
    "Norm",
    "Params",
    "Recompute",
    "Stacked",
    "State",
    "TimeMixState",
    "Weight",
    "Wkv",
    "layer_norm",
    "learning_rates",
    "names",
    "stacked",
    "unstacked",
    "weight_decays",
]
