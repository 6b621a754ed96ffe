"""Pallas kernels. Nothing here is imported before a Pallas kernel is asked for."""

TRITON_TARGET = "__gpu$xla.gpu.triton"
"""The FFI target in which JAX puts a Pallas kernel that Triton compiles."""

HOPPER_TARGET = "mosaic_gpu_v2"
"""The FFI target in which JAX puts a kernel that Mosaic GPU compiles."""

TARGETS = frozenset((TRITON_TARGET, HOPPER_TARGET))
