"""WKV5 on the native kernels: those of WKV6, under names of its own."""

import functools

from rwkv_jax.wkv6 import ffi as wkv6

why_not, how = wkv6.why_not, wkv6.how

TARGETS = wkv6.targets("wkv5")

forward = functools.partial(wkv6.forward, op="wkv5")
backward = functools.partial(wkv6.backward, op="wkv5")
forward_sequences = functools.partial(wkv6.forward_sequences, op="wkv5")
backward_sequences = functools.partial(wkv6.backward_sequences, op="wkv5")
summary = functools.partial(wkv6.summary, op="wkv5")
reverse_summary = functools.partial(wkv6.reverse_summary, op="wkv5")
step = functools.partial(wkv6.step, op="wkv5")
