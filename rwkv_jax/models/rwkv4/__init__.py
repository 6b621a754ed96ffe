"""The RWKV-4 "Dove" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_mix_k`. Weights have the official layout, [outputs, inputs].
The vectors of these trees have one axis; some official ones have leading axes of size 1.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)           for i = k, v, r
    y_t = O (sigmoid(R x_r) * wkv4(time_decay, time_first, K x_k, V x_v))

with the matrices R, K, V and O of receptance, key, value and output, and log decays
-exp(time_decay). The channel mixing has such a token shift for k and r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "RWKV: Reinventing RNNs for the Transformer Era" (arXiv:2305.13048), and the classes
`RWKV_TimeMix` and `RWKV_ChannelMix` of RWKV-LM's training code in RWKV-v4neo.
"""

from rwkv_jax.models._channel_mixing import ChannelMixParams as ChannelMixParams
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
from rwkv_jax.models.rwkv4.initialisation import init_channel_mix as init_channel_mix
from rwkv_jax.models.rwkv4.initialisation import init_time_mix as init_time_mix
from rwkv_jax.models.rwkv4.model import GENERATION as GENERATION
from rwkv_jax.models.rwkv4.parameters import TimeMixParams as TimeMixParams

init = GENERATION.init
initial_state = GENERATION.initial_state
features = GENERATION.features
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
