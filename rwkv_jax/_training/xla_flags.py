"""Flags of XLA and CUDA for training, which have to be set before JAX starts."""

import os
from collections.abc import Mapping

# XLA would otherwise compile Triton kernels for each product as well, and time them beside those of
# cuBLAS. In a model they are no faster, and compiling takes twice as long.
CUBLAS = "--xla_gpu_enable_triton_gemm=false"

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


def add(*flags: str) -> None:
    """Add flags to the variable XLA_FLAGS. Those that it has already count more."""
    os.environ["XLA_FLAGS"] = " ".join((*flags, os.environ.get("XLA_FLAGS", "")))


def add_for_several_devices(mesh: Mapping[str, int]) -> None:
    """Let what devices exchange travel while they compute."""
    # The default on GPUs of compute capability 9.0 and higher alone. XLA then also gathers
    # parameters before they are needed.
    add("--xla_gpu_enable_latency_hiding_scheduler=true")
    if mesh.get("seq", 1) == 1:
        # In programs for several devices the first pass undoes what `models._blocks.add` does. The
        # second one joins the gradients of all vectors to one array to sum them over devices, and
        # copies each from there. With "seq" the function does nothing, programs without the first
        # pass need more memory, and those without the second are as fast.
        add("--xla_disable_hlo_passes=reshape-mover,all-reduce-contiguous")
    # With one queue of work a GPU begins an exchange before the products that are launched later.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
