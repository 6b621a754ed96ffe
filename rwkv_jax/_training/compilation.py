"""The cache of compiled programs."""

import math
import os
import threading
from pathlib import Path
from typing import Any

import jax
from jax.stages import Compiled, Lowered

_without_cache = threading.Lock()

_SECONDS = "jax_persistent_cache_min_compile_time_secs"
"""The option of JAX that says how long a program that is kept takes to compile."""


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
    """Keep the programs that take a tenth of a second or more to compile, or as long as JAX's own
    variable says, in the folder, and read them from it; or keep none. Of several processes the
    first one writes the folder."""
    if folder:
        jax.config.update("jax_compilation_cache_dir", folder)
        if _SECONDS.upper() not in os.environ:
            jax.config.update(_SECONDS, 0.1)
    else:
        jax.config.update("jax_enable_compilation_cache", False)


def draw_by_kernel() -> None:
    """Have random numbers from a kernel of JAX on a GPU. The numbers are the same ones, and the
    initial parameters are compiled in half the time."""
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)


def compiled(lowered: Lowered) -> Compiled:
    """The program, compiled or read from the cache.

    While the compiler partitions a program, it calls the Python functions of `custom_partitioning`.
    JAX keeps the program under a name that has their addresses, at which the next run may have
    other functions. So it is not kept, and nor is what other threads compile meanwhile.
    """
    if "CustomSPMDPartitioning" not in lowered.as_text():
        return lowered.compile()
    config: Any = jax.config  # its annotations lack this option
    with _without_cache:
        seconds = config.jax_persistent_cache_min_compile_time_secs
        jax.config.update(_SECONDS, math.inf)
        try:
            return lowered.compile()
        finally:
            jax.config.update(_SECONDS, seconds)
