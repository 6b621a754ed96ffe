"""What stands around an operator in a layer, as functions that read and write each array once.

    norm_shift_mix      layer normalisation, token shift and mixing
    wkv7_keys           the operands k, a and b of `wkv7`
    keyed_wkv7          `wkv7` with these operands
    value_residual      the value that layers share with the first one
    read_out            normalisation of heads, bonus and gate
    projected_read_out  `read_out` with the output product
    feed_forward        the network of the channel mixings
    relu_squared        its activation
    low_rank            the map of low rank of decays, rates and gates
    low_rank_maps       several of them

Each function of this table but the last four has CUDA kernels ("ffi") for its forward and its
backward pass, and the formula itself, which XLA fuses ("xla"). They compute in float32 and round
their results once. Gradients of parameters are summed in float32. `jit`, `grad`, `vmap`,
`jax.checkpoint` and `shard_map` work as for operators. On a mesh each device computes its own rows,
tokens and heads, for which `norm_shift_mix` exchanges one token of each row. `keyed_wkv7` gathers
the tokens of a row.

The kernels of `keyed_wkv7` are for heads of 64. The product of `projected_read_out` is left to the
compiler.

`feed_forward` has kernels for two of its products, `low_rank` one for each pass, and
`low_rank_maps` for its forward pass, on GPUs of compute capability 9.0 alone.

`gated_delta_net` and `kimi_delta_net` are modules with whole layers of the delta rule. Their parts
are functions as well, without kernels: `short_convolution`, `log_decay`, `l2_norm` and
`gated_rms_norm`.
"""

from rwkv_jax.layers import gated_delta_net as gated_delta_net
from rwkv_jax.layers import kimi_delta_net as kimi_delta_net
from rwkv_jax.layers._delta_layer import DeltaNetState as DeltaNetState
from rwkv_jax.layers.delta_gates import gated_rms_norm as gated_rms_norm
from rwkv_jax.layers.delta_gates import l2_norm as l2_norm
from rwkv_jax.layers.delta_gates import log_decay as log_decay
from rwkv_jax.layers.feed_forward import feed_forward as feed_forward
from rwkv_jax.layers.keyed_wkv7 import KeyedWkv7 as KeyedWkv7
from rwkv_jax.layers.keyed_wkv7 import keyed_wkv7 as keyed_wkv7
from rwkv_jax.layers.low_rank import low_rank as low_rank
from rwkv_jax.layers.low_rank_maps import LowRankMap as LowRankMap
from rwkv_jax.layers.low_rank_maps import low_rank_maps as low_rank_maps
from rwkv_jax.layers.norm_shift_mix import Mixed as Mixed
from rwkv_jax.layers.norm_shift_mix import norm_shift_mix as norm_shift_mix
from rwkv_jax.layers.projected_read_out import projected_read_out as projected_read_out
from rwkv_jax.layers.read_out import read_out as read_out
from rwkv_jax.layers.relu_squared import relu_squared as relu_squared
from rwkv_jax.layers.short_convolution import short_convolution as short_convolution
from rwkv_jax.layers.value_residual import Values as Values
from rwkv_jax.layers.value_residual import value_residual as value_residual
from rwkv_jax.layers.wkv7_keys import Wkv7Keys as Wkv7Keys
from rwkv_jax.layers.wkv7_keys import wkv7_keys as wkv7_keys
