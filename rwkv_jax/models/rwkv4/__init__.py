"""The RWKV-4 "Dove" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_mix_k`. Weights have the official layout, [outputs, inputs].
The vectors of these trees have one axis; some official ones have leading axes of size 1.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

Source: "RWKV: Reinventing RNNs for the Transformer Era" (arXiv:2305.13048), and the classes
`RWKV_TimeMix` and `RWKV_ChannelMix` of RWKV-LM's training code in RWKV-v4neo.
"""

from rwkv_jax.models._channel_mixing import ChannelMixParams as ChannelMixParams
from rwkv_jax.models._channel_mixing import channel_mix as channel_mix
from rwkv_jax.models._linear import Weight as Weight
from rwkv_jax.models._normalisation import Norm as Norm
from rwkv_jax.models._normalisation import layer_norm as layer_norm
from rwkv_jax.models._parameters import names as names
from rwkv_jax.models._recomputation import Recompute as Recompute
from rwkv_jax.models._stacking import Stacked as Stacked
from rwkv_jax.models._training import learning_rates as learning_rates
from rwkv_jax.models._training import weight_decays as weight_decays
from rwkv_jax.models._trees import BlockParams as BlockParams
from rwkv_jax.models._trees import BlockState as BlockState
from rwkv_jax.models._trees import Params as Params
from rwkv_jax.models._trees import State as State
from rwkv_jax.models._trees import TimeMixState as TimeMixState
from rwkv_jax.models._trees import stacked as stacked
from rwkv_jax.models._trees import unstacked as unstacked
from rwkv_jax.models._wkv import Wkv as Wkv
from rwkv_jax.models.rwkv4.config import Config as Config
from rwkv_jax.models.rwkv4.decoding import generate as generate
from rwkv_jax.models.rwkv4.initialisation import init_channel_mix as init_channel_mix
from rwkv_jax.models.rwkv4.initialisation import init_time_mix as init_time_mix
from rwkv_jax.models.rwkv4.model import GENERATION as GENERATION
from rwkv_jax.models.rwkv4.parameters import TimeMixParams as TimeMixParams
from rwkv_jax.models.rwkv4.time_mixing import time_mix as time_mix

init = GENERATION.init
initial_state = GENERATION.initial_state
features = GENERATION.features
apply = GENERATION.apply
shardings = GENERATION.shardings
