"""Pallas kernels. Nothing here is imported before a Pallas kernel is asked for."""

TRITON_TARGET = "__gpu$xla.gpu.triton"
"""The FFI target in which JAX puts a Pallas kernel that Triton compiles."""
