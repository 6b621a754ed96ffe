import os

# Before JAX is imported: several CPU devices for the sharding tests.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Before rwkv_jax is imported: its annotations are checked at run time, in tests only.
jaxtyping.install_import_hook("rwkv_jax", "beartype.beartype")

import rwkv_jax


def pytest_sessionstart() -> None:
    """RWKV_JAX_REQUIRE=cpu,cuda: native kernels that have to be there, so that nothing is left out
    unnoticed on a machine that is known to have them."""
    missing = rwkv_jax.build_info()["missing"]
    for platform in filter(None, os.environ.get("RWKV_JAX_REQUIRE", "").split(",")):
        if missing[platform]:
            pytest.exit(f"RWKV_JAX_REQUIRE: {platform}: {missing[platform]}", returncode=1)
        try:
            jax.devices(platform)
        except RuntimeError as error:
            pytest.exit(f"RWKV_JAX_REQUIRE: {platform}: {error}", returncode=1)


@pytest.fixture
def cpus() -> list[jax.Device]:
    """The forced CPU devices, on a machine with a GPU as well."""
    devices = jax.devices("cpu")
    assert len(devices) == 4
    return devices


@pytest.fixture
def unchecked_types():
    """Without the run-time checks of annotations, which would answer before the package's own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
