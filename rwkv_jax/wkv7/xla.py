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
from rwkv_jax._portable.chain import Chain
from rwkv_jax._portable.terms import Read, Terms
from rwkv_jax.wkv7 import reference
from rwkv_jax.wkv7.signature import SIGNATURE


def terms(inputs: Arrays) -> Terms:
    r, k, a, b = (inputs[name] for name in "rkab")
    return Terms([Read(a), Read(r, after=True)], [b, k])


IMPLEMENTATION = Chain(SIGNATURE, terms, reference.IMPLEMENTATION)
