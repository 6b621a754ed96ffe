"""Flags of XLA for training, which have to be set before JAX starts."""

import os

# XLA would otherwise compile Triton kernels for each product as well, and time them beside those of
# cuBLAS. In a model they are no faster, and compiling takes twice as long.
CUBLAS = "--xla_gpu_enable_triton_gemm=false"

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"

# For several devices: what they exchange travels while they compute. It is the default on GPUs of
# compute capability 9.0 and higher alone. XLA then also gathers parameters before they are needed.
OVERLAP = "--xla_gpu_enable_latency_hiding_scheduler=true"


def add(*flags: str) -> None:
    """Add flags to the variable XLA_FLAGS. Those that it has already count more."""
    os.environ["XLA_FLAGS"] = " ".join((*flags, os.environ.get("XLA_FLAGS", "")))
