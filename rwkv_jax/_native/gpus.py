"""The GPUs that programs are for."""

import jax

from rwkv_jax._native import library

HOPPER = ("H100", "H200", "H800", "H20")
"""Parts of the names of GPUs of compute capability 9.0."""


def is_hopper(kind: str) -> bool:
    """Whether this is the name of a GPU of compute capability 9.0."""
    return any(name in kind for name in HOPPER)


def other_than_hopper() -> str | None:
    """Why the kernels do not run on the GPUs that programs are for, as far as those are known, or
    None."""
    built = getattr(library.build(library.MODULES["cuda"]), "CUDA_ARCHS", ())
    if built and not any(arch.startswith("90a") for arch in built):
        return f"the CUDA module was built for {', '.join(built)}; the kernels need 90a"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        found = {device.device_kind}
        right = is_hopper(device.device_kind)
    else:
        try:
            devices = jax.devices("cuda")
        except RuntimeError:
            return "no CUDA GPU is here; the kernels run on those of compute capability 9.0"
        found = {str(getattr(x, "compute_capability", "unknown")) for x in devices}
        right = found == {"9.0"}
    kinds = ", ".join(sorted(found))
    return None if right else f"the GPU is {kinds}; accepted are those of compute capability 9.0"
