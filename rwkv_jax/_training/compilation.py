"""The cache of compiled programs."""

import os
from pathlib import Path

import jax


def default_cache() -> str | None:
    """The folder of the cache: that of JAX's own variable, or one among the caches of the user, if
    the user has a home."""
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return given
    try:
        caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return str(Path(caches) / "rwkv-jax" / "compiled")


def use_cache(folder: str | None) -> None:
    """Keep the programs that take a second or more to compile in the folder, and read them from
    it; or keep none. Those of several devices are compiled in each run: they call Python functions,
    of which the name of a program in the cache has the address alone."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
    else:
        jax.config.update("jax_enable_compilation_cache", False)


def draw_by_kernel() -> None:
    """Have random numbers from a kernel of JAX on a GPU. The numbers are the same ones, and the
    initial parameters are compiled in half the time."""
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
