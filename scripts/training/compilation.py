"""The cache of compiled programs."""

import os
from pathlib import Path

import jax


def default_cache() -> Path:
    """The folder of the cache: that of JAX's own variable, or one among the caches of the user."""
    if given := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "rwkv-jax" / "compiled"


def use_cache(folder: Path) -> None:
    """Keep the programs that take a second or more to compile in the folder, and read them from
    it."""
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # The programs of several devices hold the address of a Python function, which would make them
    # other programs in each process.
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)
