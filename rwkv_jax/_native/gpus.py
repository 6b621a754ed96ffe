"""The GPUs that programs are for."""

import jax

from rwkv_jax._native import library

HOPPER = ("H100", "H200", "H800", "H20")
"""Parts of the names of GPUs of compute capability 9.0."""


def kinds() -> set[str]:
    """What is known of them: the compute capabilities of those that are here, or the name of an
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
    found = kinds()
    return bool(found) and all(x == "9.0" or any(name in x for name in HOPPER) for x in found)


def other_than_hopper() -> str | None:
    """Why the kernels for Hopper GPUs of the CUDA module do not run on them, or None."""
    built = getattr(library.build(library.MODULES["cuda"]), "CUDA_ARCHS", ())
    if built and not any(arch.startswith("90a") for arch in built):
        return f"the CUDA module was built for {', '.join(built)}; the kernels need 90a"
    if are_hopper():
        return None
    if not (found := kinds()):
        return "no CUDA GPU is here; the kernels run on those of compute capability 9.0"
    given = ", ".join(sorted(found))
    return f"the GPU is {given}; accepted are those of compute capability 9.0"
