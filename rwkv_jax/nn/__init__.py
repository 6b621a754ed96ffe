"""RWKV layers for Flax NNX, `rwkv_jax.nn.flax`, and for Equinox, `rwkv_jax.nn.equinox`.

Import one of the two; this module imports neither framework.
"""
