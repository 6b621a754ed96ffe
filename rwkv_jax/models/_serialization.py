"""The names by which `jax.export` serialises the trees of models."""

from jax import export

from rwkv_jax.models import rwkv4, rwkv5, rwkv6, rwkv7
from rwkv_jax.models._linear import Adapted, Dropout, Table, WeightByInput
from rwkv_jax.wkv4 import Wkv4State

_SHARED = (
    *(rwkv7.Params, rwkv7.BlockParams, rwkv7.BlockState, rwkv7.TimeMixState),
    *(rwkv7.Stacked, rwkv7.Norm, rwkv7.Weight, WeightByInput, Table, Adapted, Dropout),
)
_TYPES = {
    "rwkv_jax": (Wkv4State,),
    "rwkv_jax.models": _SHARED,
    **{x.__name__: (x.TimeMixParams, x.ChannelMixParams) for x in (rwkv4, rwkv6, rwkv7)},
    rwkv5.__name__: (rwkv5.TimeMixParams,),  # with the channel mixing of RWKV-4
}


def register() -> None:
    """Let exported programs have these types in their arguments and results."""
    for place, types in _TYPES.items():
        for each in types:
            name = f"{place}.{each.__name__}"
            export.register_namedtuple_serialization(each, serialized_name=name)
