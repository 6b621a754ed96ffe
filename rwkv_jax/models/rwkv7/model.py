"""The forward pass of the model."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models import _model
from rwkv_jax.models._recomputation import Recompute
from rwkv_jax.models._trees import Params, State
from rwkv_jax.models._wkv import Options, Wkv
from rwkv_jax.models.rwkv7.channel_mixing import mix_channels
from rwkv_jax.models.rwkv7.state import initial_wkv
from rwkv_jax.models.rwkv7.time_mixing import mix_tokens
from rwkv_jax.wkv7 import wkv7

GENERATION = _model.Generation("rwkv7", mix_tokens, mix_channels, initial_wkv)


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
    wkv: Wkv = wkv7,
) -> tuple[Float[Array, "B *T C"], State]:
    """What `params.head` makes logits of: the normalised output of the last block, for a sequence
    [B, T] of tokens or for one token each, [B].

    `rwkv_jax.losses` computes a loss from it without the logits of all tokens at once.

    Args:
      params: the parameters, in either form: as `init` or as `stacked` gives them.
      tokens: integers below the size of the vocabulary.
      state: the state after the tokens before `tokens`, in the form of `params`; `initial_state` if
        None.
      segment_ids: which tokens of a row are one document, with 0 for padding; for sequences only.
        The first document goes on from `state`, every other one starts anew, and the next state is
        the one after the last document.
      dtype: the dtype of the activations.
      implementation: the implementation of `wkv7`.
      layers: the implementation of the functions of `rwkv_jax.layers`. Where tokens of a sequence
        are distributed over devices, give "xla", which the compiler partitions.
      recompute: what the backward pass computes again rather than keeps: "cheap", all but the
        products and the results of `wkv7`; "blocks", everything but the activations between blocks;
        or None, what costs nothing to speak of.
      wkv: the function that mixes sequences: `wkv7`, or `sharding.shard(wkv7, ...)`.

    Returns:
      The features [B, T, C] or [B, C] in `dtype`, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with one token each; or `state` has
        another form than `params`.
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
    wkv: Wkv = wkv7,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """Logits of the next token after each token of a sequence [B, T], or after one token each, [B].

    The arguments and errors are those of `features`.

    Returns:
      Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.
    """
    options = Options(segment_ids, implementation, layers, wkv)
    return _model.apply(GENERATION, params, tokens, state, options, dtype, recompute)
