"""What a run of tokens of WKV5 does to a state."""

from rwkv_jax._linear_attention.summary import SUMMARY as SUMMARY
