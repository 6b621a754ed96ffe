"""WKV5 and WKV6 in links of plain jnp, for any backend, head size and decay.

With P[i, j] the decay of the tokens between j and i, without both (see
`rwkv_jax._portable.algebra`), `before` that of the tokens before one, and `after` that of those
after it, a link of tokens is

    R_ij = r_i . (P[i, j] k_j)  for j < i,    R_ii = r_i . (u k_i)
    Y = (r before) S^T + R V
    S_after = S diag(stay) + V^T (k after)
"""

from rwkv_jax._operator.call import Arrays
from rwkv_jax._portable.terms import Read, Terms


def terms(inputs: Arrays) -> Terms:
    r, k, u = (inputs[name] for name in "rku")
    return Terms([Read(r, now=r * u)], [k])
