"""A run of tokens as one map of the state: that of WKV6."""

from rwkv_jax.wkv6.segments import AXES, apply, combine, summarize

__all__ = ["AXES", "apply", "combine", "summarize"]
