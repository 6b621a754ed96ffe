"""WKV5 and WKV6 in links of plain jnp, for any backend, head size and decay.

With P[i, j] the decay of the tokens between j and i, without both (see
`rwkv_jax._portable.algebra`), `before` that of the tokens before one, and `after` that of those
after it, a link of tokens is

    R_ij = r_i . (P[i, j] k_j)  for j < i,    R_ii = r_i . (u k_i)
    Y = (r before) S^T + R V
    S_after = S diag(stay) + V^T (k after)
"""

import jax.numpy as jnp

from rwkv_jax._operator.call import Arrays
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Einsum, Tokens


def parts(einsum: Einsum, decay: str, inputs: Arrays, tokens: Tokens) -> Arrays:
    """`w` is that of each token, or the same for all."""
    r, w, k, u = (inputs[name] for name in "rwku")
    decays = algebra.decays(jnp.broadcast_to(w, r.shape), decay, tokens)
    ((pairs,),) = algebra.pairs(einsum, decays, (r,), (k,))
    return {
        "stay": decays.stay,
        "reads": r * decays.before,
        "y_of_v": pairs + algebra.diagonal(einsum("...tk,...tk->...t", r * u, k)),
        "keys": k * decays.after,
    }
