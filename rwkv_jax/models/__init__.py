"""RWKV language models as functions of parameter trees; `rwkv_jax.nn` wraps them as layers.

Each generation is a package. What the generations share is in the private modules beside them.
"""

from rwkv_jax.models import rwkv7 as rwkv7
