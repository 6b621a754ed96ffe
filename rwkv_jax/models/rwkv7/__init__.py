"""The RWKV-7 "Goose" language model: parameters, initialisation and forward pass.

Parameter trees have the field names of the official checkpoints, so the path of a parameter is its
official name, as in `blocks.0.att.receptance.weight`. Weights have the official layout, [outputs,
inputs]. Official vectors have leading axes of size 1; the vectors of these trees do not.

Every forward function has two modes, which the rank of its input selects: a sequence has a time
axis, a single token (decoding) has none. Both modes take a state and return the next one.
Parameters are cast to the dtype of the activations; normalisations, states and logits are float32.

A row of a batch may hold several documents, which `segment_ids` tells apart as in `wkv7`. Neither a
state nor a token shift crosses from one document to the next. Results at padding have no meaning.

The time mixing of normalised activations x is

    x_i = x_t + (x_{t-1} - x_t) * mix_i                           for i = r, w, k, v, a, g
    r, k, v = R x_r, K x_k, V x_v
    w = w0 + tanh(x_w w1) w2
    alpha = sigmoid(a0 + (x_a a1) a2)
    g = sigmoid(x_g g1) g2
    v = v + (v_first - v) * sigmoid(v0 + (x_v v1) v2)             but in the first layer
    kk = k * k_k, with length 1 in each head
    k = k * (1 + (alpha - 1) * k_a)
    z = wkv7(r, w, k, v, -kk, kk * alpha, decay="sigmoid")
    y_t = O ((ln_x(z) + sum(r * k * r_k) v) * g)

with the parameters x_r to x_g as mix_i, the matrices R, K, V and O of receptance, key, value and
output, the value `v_first` of the first layer, and `ln_x` a normalisation of each head with eps
64e-5. The channel mixing has such a token shift for k alone, and y_t = V max(K x_k, 0)^2 with
matrices K and V of its own.

Source: "RWKV-7 Goose with Expressive Dynamic State Evolution" (arXiv:2503.14456) and, for the
initialisation, the training code of RWKV-LM.
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
from rwkv_jax.models.rwkv7.config import Config as Config
from rwkv_jax.models.rwkv7.initialisation import init_channel_mix as init_channel_mix
from rwkv_jax.models.rwkv7.initialisation import init_time_mix as init_time_mix
from rwkv_jax.models.rwkv7.model import GENERATION as GENERATION
from rwkv_jax.models.rwkv7.parameters import ChannelMixParams as ChannelMixParams
from rwkv_jax.models.rwkv7.parameters import TimeMixParams as TimeMixParams

init = GENERATION.init
initial_state = GENERATION.initial_state
features = GENERATION.features
apply = GENERATION.apply
time_mix = GENERATION.time_mix
channel_mix = GENERATION.channel_mix
shardings = GENERATION.shardings

rwkv7 = apply
"""The first name of `apply`, for callers that still use it."""
