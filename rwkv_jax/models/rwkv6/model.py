"""What the generation consists of."""

from rwkv_jax.models import _placement
from rwkv_jax.models._channel_mixing import mix_channels
from rwkv_jax.models._model import Generation
from rwkv_jax.models.rwkv6.config import Config
from rwkv_jax.models.rwkv6.initialisation import init_channel_mix, init_time_mix
from rwkv_jax.models.rwkv6.state import initial_wkv
from rwkv_jax.models.rwkv6.time_mixing import mix_tokens
from rwkv_jax.wkv6 import wkv6

GENERATION = Generation(
    name="rwkv6",
    config=Config,
    wkv=wkv6,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("time_maa_w1", "time_decay_w1"), ("data",)),
        (("time_decay_w2",), ("data", "model")),
        (("time_decay", "time_faaaa", "ln_x.weight", "ln_x.bias"), ("model",)),
    ),
)
