"""What the generation consists of."""

from rwkv_jax.models import _placement
from rwkv_jax.models._channel_mixing import mix_channels
from rwkv_jax.models._model import Generation
from rwkv_jax.models.rwkv4.config import Config
from rwkv_jax.models.rwkv4.initialisation import init_channel_mix, init_time_mix
from rwkv_jax.models.rwkv4.state import initial_wkv
from rwkv_jax.models.rwkv4.time_mixing import mix_tokens
from rwkv_jax.wkv4 import wkv4

GENERATION = Generation(
    name="rwkv4",
    config=Config,
    wkv=wkv4,
    mix_tokens=mix_tokens,
    mix_channels=mix_channels,
    init_time_mix=init_time_mix,
    init_channel_mix=init_channel_mix,
    initial_wkv=initial_wkv,
    rules=(
        *_placement.LINEAR,
        (("time_decay", "time_first"), ("model",)),
    ),
)
