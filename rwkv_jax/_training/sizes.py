"""How large a model is: its parameters, and the operations of training it."""

from typing import Any

from rwkv_jax.models import rwkv7


def size(params: Any) -> int:
    """How many numbers the parameters are, or a part of them."""
    return sum(x.size for x in rwkv7.names(params).values())


def flops_per_token(params: rwkv7.Params, frozen: Any = None) -> int:
    """Floating-point operations of training on a token.

    Each number of a matrix is multiplied and added once in the forward pass and twice in the
    backward pass, or once if it is `frozen`, and each number of a state [K, K] takes part in four
    products of the time mixing. Values that the backward pass computes again do not count, nor does
    what is trained beside the parameters.
    """
    named = rwkv7.names(params)
    states = sum(x.size * x.shape[-1] for name, x in named.items() if name.endswith(".r_k"))
    return 6 * (_matrices(params) + 4 * states) - 2 * _matrices(frozen)


def _matrices(params: Any) -> int:
    """How many numbers the matrices have that are multiplied by activations."""
    return sum(
        x.size
        for name, x in rwkv7.names(params).items()
        if x.ndim == 2 and not name.endswith(("emb.weight", ".r_k", ".scale"))
    )
