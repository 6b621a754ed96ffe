"""WKV5 in Pallas kernels: those of WKV6, which take one w for all tokens as well."""

from rwkv_jax.wkv6 import pallas as wkv6

why_not, how, step = wkv6.why_not, wkv6.how, wkv6.step
forward, backward = wkv6.forward, wkv6.backward
