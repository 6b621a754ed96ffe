"""RWKV language models as functions of parameter trees; `rwkv_jax.nn` wraps them as layers."""

from rwkv_jax.models import rwkv7 as rwkv7
