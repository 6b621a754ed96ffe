"""The kernels of the cross entropy on CUDA GPUs.

One takes logits, which it reads once. The other takes hidden states and the weight, so that no
logits are in memory: it has the exponentials of a token where the gradient would be, and a factor
for each token, which is known when all of them are.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Float32

from rwkv_jax._native import gpus, library
from rwkv_jax.losses._options import Axis, Options, Tokens

OF_LOGITS, OF_HIDDEN_STATES = "rwkv_cross_entropy_v1", "rwkv_head_cross_entropy_v1"
library.register_export_targets(OF_LOGITS, OF_HIDDEN_STATES)

LOGITS_MULTIPLE = 8
"""The first kernel takes vocabularies that are a multiple of this."""

TILE, WIDTH_MULTIPLE, MAX_SIZE = 256, 64, 2**18
"""The second one has tiles of so many tokens and logits, and takes vocabularies of whole tiles and
channels that are a multiple of the second number, up to the third."""

MIN_TOKENS, MAX_TOKENS = 1024, 2**24
"""The second one is taken from so many tokens on, whose product fills a GPU, and takes up to so
many."""


def of_logits(
    options: Options, tokens: Tokens, logits: Float32[Array, "tokens vocabulary"]
) -> tuple[Float32[Array, "tokens"], Float[Array, "tokens vocabulary"]]:
    """The losses, and their gradients in the logits in the dtype of the hidden states."""
    # A rule for meshes admits no constant arrays.
    coefficients = jnp.concatenate(
        [jnp.full(1, x, jnp.float32) for x in (options.z_loss, options.l2_wrap)]
    )
    results = [(tokens.scale.shape, jnp.float32), (logits.shape, tokens.hidden_states.dtype)]
    targets = tokens.targets.astype(jnp.int32)
    found, dlogits = library.call(OF_LOGITS, results, logits, targets, tokens.scale, coefficients)
    return found, dlogits


def takes_hidden_states(options: Options, axis: Axis, hidden_states: Array, weight: Array) -> bool:
    """Whether the second kernel takes these hidden states, on the GPUs that the program is for."""
    (tokens, width), vocabulary = hidden_states.shape, weight.shape[0]
    return (
        axis is None
        and options.soft_cap is None
        and options.z_loss == 0
        and hidden_states.dtype == jnp.bfloat16
        and options.precision in (None, lax.Precision.DEFAULT)
        and MIN_TOKENS <= tokens <= MAX_TOKENS
        and 0 < width <= MAX_SIZE
        and width % WIDTH_MULTIPLE == 0
        and vocabulary <= MAX_SIZE
        and vocabulary % TILE == 0
        and not gpus.why_not_hopper()
    )


def of_hidden_states(
    options: Options, tokens: Tokens, weight: Float[Array, "vocabulary C"]
) -> tuple[Float32[Array, "tokens"], Float[Array, "tokens vocabulary"], Float32[Array, "tokens"]]:
    """The losses, and their gradients in the logits but for a factor of each token, which is the
    last result."""
    hidden_states, targets = tokens.hidden_states, tokens.targets.astype(jnp.int32)
    rows = weight.at[targets].get(mode="clip")
    of_target = jnp.sum(hidden_states.astype(jnp.float32) * rows.astype(jnp.float32), axis=1)
    count, vocabulary = len(hidden_states), len(weight)
    results = [
        ((count,), jnp.float32),
        ((count,), jnp.float32),
        ((count, vocabulary), hidden_states.dtype),
        # Scratch.
        ((count,), jnp.float32),
        ((-(-count // TILE),), jnp.int32),
        ((vocabulary // TILE, count, 4), jnp.float32),
    ]
    l2_wrap = jnp.full(1, options.l2_wrap, jnp.float32)
    found, factors, exponentials, *_ = library.call(
        *(
            OF_HIDDEN_STATES,
            results,
            hidden_states,
            weight,
            targets,
            of_target,
            tokens.scale,
            l2_wrap,
        )
    )
    return found, exponentials, factors
