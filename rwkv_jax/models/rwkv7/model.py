"""The forward pass of the model."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Float32, Int

from rwkv_jax.models._linear import embed, logits
from rwkv_jax.models._normalisation import layer_norm
from rwkv_jax.models._token_shift import check_segment_ids
from rwkv_jax.models.rwkv7.channel_mixing import mix_channels
from rwkv_jax.models.rwkv7.parameters import Params
from rwkv_jax.models.rwkv7.state import BlockState, State, initial_state
from rwkv_jax.models.rwkv7.time_mixing import Options, Wkv, mix_tokens
from rwkv_jax.wkv7 import wkv7


def features(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    wkv: Wkv = wkv7,
) -> tuple[Float[Array, "B *T C"], State]:
    """What `params.head` makes logits of: the normalised output of the last block, for a sequence
    [B, T] of tokens or for one token each, [B].

    `rwkv_jax.losses` computes a loss from it without the logits of all tokens at once.

    Args:
      params: the parameters.
      tokens: integers below the size of the vocabulary.
      state: the state after the tokens before `tokens`; `initial_state` if None.
      segment_ids: which tokens of a row are one document, with 0 for padding; for sequences only.
        The first document goes on from `state`, every other one starts anew, and the next state is
        the one after the last document.
      dtype: the dtype of the activations.
      implementation: the implementation of `wkv7`.
      layers: the implementation of the functions of `rwkv_jax.layers`. Where tokens of a sequence
        are distributed over devices, give "xla", which the compiler partitions.
      wkv: the function that mixes sequences: `wkv7`, or `sharding.shard(wkv7, ...)`.

    Returns:
      The features [B, T, C] or [B, C] in `dtype`, and the next state.

    Raises:
      TypeError, ValueError: `segment_ids` is wrong, or given with one token each.
    """
    check_segment_ids("rwkv7", segment_ids, tokens.shape)
    if state is None:
        state = initial_state(params, tokens.shape[0], dtype)
    x = embed(params.emb, tokens, dtype)
    v_first = None
    next_state = []
    options = Options(segment_ids, implementation, layers, wkv)
    for p, s in zip(params.blocks, state, strict=True):
        if p.ln0 is not None:
            x = layer_norm(p.ln0, x)
        x, dx, att, v_first = mix_tokens(p.att, p.ln1, x, s.att, v_first, options)
        x, dx, ffn = mix_channels(p.ffn, p.ln2, x + dx, s.ffn, segment_ids, layers)
        x = x + dx
        next_state.append(BlockState(att, ffn))
    return layer_norm(params.ln_out, x), tuple(next_state)


def apply(
    params: Params,
    tokens: Int[Array, " B *T"],
    state: State | None = None,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    layers: str | None = None,
    wkv: Wkv = wkv7,
) -> tuple[Float32[Array, "B *T vocabulary"], State]:
    """Logits of the next token after each token of a sequence [B, T], or after one token each, [B].

    The arguments and errors are those of `features`.

    Returns:
      Logits [B, T, vocabulary] or [B, vocabulary] in float32, and the next state.
    """
    x, next_state = features(
        *(params, tokens, state),
        segment_ids=segment_ids,
        dtype=dtype,
        implementation=implementation,
        layers=layers,
        wkv=wkv,
    )
    return logits(params.head, x), next_state
