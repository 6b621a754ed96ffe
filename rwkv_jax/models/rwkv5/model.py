"""The forward pass of the model."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models import _model
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._trees import Params, State
from rwkv_jax.models._wkv import Options, Wkv
from rwkv_jax.models.rwkv5.channel_mixing import mix_channels
from rwkv_jax.models.rwkv5.state import initial_wkv
from rwkv_jax.models.rwkv5.time_mixing import mix_tokens
from rwkv_jax.wkv5 import wkv5

GENERATION = _model.Generation("rwkv5", mix_tokens, mix_channels, initial_wkv)


def features(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    recompute: Recompute | None = None,
    wkv: Wkv = wkv5,
) -> tuple[Float[Array, "B *T C"], State]:
    """What `params.head` makes logits of: the normalised output of the last block, for a sequence
    [B, T] of tokens or for one token each, [B].

    The arguments, results and errors are those of `rwkv7.features`, with `wkv5` for `wkv7`.
    """
    options = Options(segment_ids, implementation, layers, wkv)
    return _model.features(GENERATION, params, tokens, state, options, dtype, recompute)


def apply(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    recompute: Recompute | None = None,
    wkv: Wkv = wkv5,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """Logits of the next token after each token of a sequence [B, T], or after one token each, [B].

    The arguments and errors are those of `features`.

    Returns:
      Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.
    """
    options = Options(segment_ids, implementation, layers, wkv)
    return _model.apply(GENERATION, params, tokens, state, options, dtype, recompute)
