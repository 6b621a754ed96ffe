"""The GPUs that programs are for: the one place that asks what they are.

A program may run on any GPU of the process, so that what is decided while it is traced, or lowered
for another machine, holds for all of them.
"""

import itertools

import jax

from rwkv_jax._native import library

HOPPER = ("H100", "H200", "H800", "H20")
"""Parts of the names of GPUs of compute capability 9.0."""

LARGE = (132, 232448)
"""The multiprocessors and the bytes of shared memory for a block of an H100 or H200."""


def limits() -> dict[str, int]:
    """The multiprocessors and the bytes of shared memory for a block that every GPU has, those of a
    large GPU where there is none."""
    native = library.module("cuda")
    devices = list(itertools.takewhile(bool, map(native.device, itertools.count())))
    multiprocessors, shared_memory = map(min, zip(*devices or [LARGE], strict=True))
    return {"multiprocessors": multiprocessors, "shared_memory": shared_memory}


def device_kinds() -> set[str]:
    """What is known of the GPUs: the compute capabilities of those that are here, or the name of an
    abstract device that is not here. Empty without either."""
    try:
        here = jax.local_devices(backend="cuda")
    except RuntimeError:
        here = []
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        here = [x for x in here if x.device_kind == device.device_kind]
        if not here:
            return {device.device_kind}
    return {str(getattr(x, "compute_capability", "unknown")) for x in here}


def are_hopper() -> bool:
    """Whether all of them are known to be Hopper GPUs."""
    kinds = device_kinds()
    return bool(kinds) and all(x == "9.0" or any(name in x for name in HOPPER) for x in kinds)


def why_not_hopper() -> str | None:
    """Why the kernels for Hopper GPUs of the CUDA module do not run on them, or None."""
    built = getattr(library.build(library.MODULES["cuda"]), "CUDA_ARCHS", ())
    if built and not any(arch.startswith("90a") for arch in built):
        return f"the CUDA module was built for {', '.join(built)}; the kernels need 90a"
    if are_hopper():
        return None
    if not (kinds := device_kinds()):
        return "no CUDA GPU is here; the kernels run on those of compute capability 9.0"
    return f"the GPU is {', '.join(sorted(kinds))}; accepted are those of compute capability 9.0"
