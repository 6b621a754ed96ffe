"""What the generation consists of."""

from rwkv_jax.models import _placement
from rwkv_jax.models._model import Generation
from rwkv_jax.models.rwkv7.block_step import postponed, step_block
from rwkv_jax.models.rwkv7.channel_mixing import mix_channels
from rwkv_jax.models.rwkv7.config import Config
from rwkv_jax.models.rwkv7.initialisation import init_channel_mix, init_time_mix
from rwkv_jax.models.rwkv7.state import initial_wkv
from rwkv_jax.models.rwkv7.time_mixing import mix_tokens
from rwkv_jax.wkv7 import wkv7

GENERATION = Generation(
    name="rwkv7",
    config=Config,
    wkv=wkv7,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("w1", "a1", "v1", "g1"), ("data",)),
        (("w2", "a2", "v2", "g2"), ("data", "model")),
        (("w0", "a0", "v0", "k_k", "k_a", "r_k", "ln_x.weight", "ln_x.bias"), ("model",)),
    ),
    step_block=step_block,
    postponed_block=postponed,
)
