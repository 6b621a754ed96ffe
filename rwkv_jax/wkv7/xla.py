"""WKV7 in links of plain jnp, for any backend, head size and decay.

Inside a link of tokens the recurrence is solved at once. With P[i, j] the decay of the tokens
between j and i, without both (see `rwkv_jax._portable.algebra`), `before` that of the tokens before
one, and `after` that of the tokens after it:

    A_ij = a_i . (P[i, j] b_j)          B_ij = a_i . (P[i, j] k_j)          for j < i
    Q_ij = r_i . (d_i P[i, j] b_j)      R_ij = r_i . (d_i P[i, j] k_j)      for j < i
    Q_ii = r_i . b_i                    R_ii = r_i . k_i
    U = (I - A)^-1 ((a before) S^T + B V)                    row i of U is S_{i-1} a_i
    Y = (r d before) S^T + Q U + R V
    S_after = S diag(stay) + U^T (b after) + V^T (k after)
"""

from rwkv_jax._operator.call import Arrays
from rwkv_jax._portable import algebra
from rwkv_jax._portable.algebra import Einsum, Tokens
from rwkv_jax._portable.chain import Chain
from rwkv_jax.wkv7 import reference
from rwkv_jax.wkv7.signature import SIGNATURE


def parts(einsum: Einsum, decay: str, inputs: Arrays, tokens: Tokens) -> Arrays:
    r, w, k, a, b = (inputs[name] for name in "rwkab")
    decays = algebra.decays(w, decay, tokens)
    decayed = r * decays.own
    (a_b, a_k), (r_b, r_k) = algebra.pairs(einsum, decays, (a, decayed), (b, k))
    return {
        "stay": decays.stay,
        "asks": a * decays.before,
        "u_of_u": a_b,
        "u_of_v": a_k,
        "reads": decayed * decays.before,
        "y_of_u": r_b + algebra.diagonal(einsum("...tk,...tk->...t", r, b)),
        "y_of_v": r_k + algebra.diagonal(einsum("...tk,...tk->...t", r, k)),
        "kept": b * decays.after,
        "keys": k * decays.after,
    }


IMPLEMENTATION = Chain(SIGNATURE, parts, reference.IMPLEMENTATION)
