"""The RWKV-6 "Finch" language model (x060): parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.time_maa_w1`. Weights have the official layout, [outputs,
inputs]. The vectors of these trees have one axis; most official ones have leading axes of size 1.

The two modes, dtypes, states and `segment_ids` are those of `rwkv_jax.models.rwkv7`.

The time mixing of normalised activations x is

    m_i = tanh((x_t + (x_{t-1} - x_t) * time_maa_x) time_maa_w1)_i time_maa_w2_i
    x_i = x_t + (x_{t-1} - x_t) * (time_maa_i + m_i)              for i = w, k, v, r, g
    w = time_decay + tanh(x_w time_decay_w1) time_decay_w2
    y_t = O (ln_x(wkv6(R x_r, w, K x_k, V x_v, time_faaaa)) * silu(G x_g))

with the matrices R, K, V, G and O of receptance, key, value, gate and output, decay factors
exp(-exp(w)), and `ln_x` a normalisation of each head with eps 64e-5. The channel mixing has
x_i = x_t + (x_{t-1} - x_t) * time_maa_i for i = k, r, and

    y_t = sigmoid(R x_r) * (V max(K x_k, 0)^2)

with matrices K, R and V of its own.

Source: "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv:2404.05892),
and the classes `RWKV_Tmix_x060` and `RWKV_CMix_x060` of RWKV-LM's training code.
"""

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
from rwkv_jax.models.rwkv6.config import Config as Config
from rwkv_jax.models.rwkv6.initialisation import init_channel_mix as init_channel_mix
from rwkv_jax.models.rwkv6.initialisation import init_time_mix as init_time_mix
from rwkv_jax.models.rwkv6.model import GENERATION as GENERATION
from rwkv_jax.models.rwkv6.parameters import ChannelMixParams as ChannelMixParams
from rwkv_jax.models.rwkv6.parameters import TimeMixParams as TimeMixParams

init = GENERATION.init
initial_state = GENERATION.initial_state
features = GENERATION.features
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings
