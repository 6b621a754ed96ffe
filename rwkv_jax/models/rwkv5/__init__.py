"""The RWKV-5 "Eagle" language model (5.2, x052): parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_mix_k`. Weights have the official layout, [outputs, inputs].
The vectors of these trees have one axis; most official ones have leading axes of size 1.

Versions 5.0 and 5.1 have one decay and one bonus for each head, and 5.0 has no gate. They are the
same functions with other parameters; `init` gives those of 5.2.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    x_i = x_t * time_mix_i + x_{t-1} * (1 - time_mix_i)           for i = k, v, r, g
    z_t = wkv5(R x_r, time_decay, K x_k, V x_v, time_faaaa)
    y_t = O (ln_x(z_t / 8) * silu(G x_g))

with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
exp(-exp(time_decay)), and `ln_x` a normalisation of each head with eps 1e-5. Version 5.0 has
neither the mix for g nor the gate, and exp(time_first) for time_faaaa. The channel mixing has such
a token shift for k and r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv:2404.05892),
the classes `RWKV_Tmix_x052` and `RWKV_CMix_x052` of RWKV-LM's training code, and for the earlier
versions `RWKV_TimeMix_RWKV5_Preview` in RWKV-v4neo.
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
from rwkv_jax.models.rwkv5.config import Config as Config
from rwkv_jax.models.rwkv5.initialisation import init_channel_mix as init_channel_mix
from rwkv_jax.models.rwkv5.initialisation import init_time_mix as init_time_mix
from rwkv_jax.models.rwkv5.model import GENERATION as GENERATION
from rwkv_jax.models.rwkv5.parameters import TimeMixParams as TimeMixParams

init = GENERATION.init
initial_state = GENERATION.initial_state
features = GENERATION.features
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
