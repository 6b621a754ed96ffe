"""Layers for `rwkv_jax.nn.flax` (Flax NNX) and `rwkv_jax.nn.equinox`. Import one of the two; this
module imports neither framework."""
