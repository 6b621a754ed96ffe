"""Several processes that train together: how they find each other, what the first one decides for
all, and what is said when one of them is lost."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from rwkv_jax._training import watcher

HEARTBEAT = 30
"""After how many seconds without a sign of a process JAX ends all others."""


def connect(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Make one run of this process and the others, if there are any: those that the options of
    these names give, or else those that Slurm, Open MPI or Kubernetes has started, which JAX finds.

    A process computes on the GPUs that it sees. If Slurm or Open MPI has started several on its
    host and it sees more than one GPU, it computes on the one of its own number.

    The program exits where JAX does not find the others.
    """
    alone = not coordinator and (processes == 1 or not _started_with_others())
    if alone or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            coordinator, processes, process, heartbeat_timeout_seconds=HEARTBEAT
        )
    except (ValueError, RuntimeError) as error:
        sys.exit(
            f"The other processes of this run are not found: {error}\nAccepted are --coordinator, "
            "--processes and --process, or --processes 1 for a run of this process alone"
        )
    # With Slurm and Open MPI, JAX gives each process one GPU.
    if "JAX_LOCAL_DEVICE_IDS" not in os.environ and _has_its_gpus():
        jax.config.update("jax_cuda_visible_devices", "all")
        jax.config.update("jax_rocm_visible_devices", "all")


def count() -> int:
    """How many processes there are. JAX's own function waits until the devices have started."""
    return jax.process_count() if jax.distributed.is_initialized() else 1


def is_first() -> bool:
    """Whether this process is the first one, or alone."""
    return count() == 1 or jax.process_index() == 0


def _started_with_others() -> bool:
    """Whether a launcher that JAX knows has started several processes, of which this is one."""
    # Variables of the launched processes: in the shell of an allocation of Slurm SLURM_NTASKS may
    # be 8, but its step has one task. Of Open MPI within Slurm, JAX looks at Open MPI first.
    for name in ("OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        if count := os.environ.get(name):
            return int(count) > 1
    # JAX asks the cluster for the number of pods, with a package that it does not install.
    return "JOB_COMPLETION_INDEX" in os.environ and bool(importlib.util.find_spec("kubernetes"))


def _has_its_gpus() -> bool:
    """Whether this process need not share the GPUs that it sees."""
    env = os.environ
    one_visible = "," not in env.get("CUDA_VISIBLE_DEVICES", ",")
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in env:
        return one_visible or env["OMPI_COMM_WORLD_LOCAL_SIZE"] == "1"
    return one_visible or env.get("SLURM_STEP_NUM_TASKS") == env.get("SLURM_STEP_NUM_NODES")


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[None]:
    """A context of a run that writes checkpoints to the folder. If this is one of several processes
    and ends inside, killed or by an error, another process prints from which checkpoint the run can
    resume: JAX ends a process at once when it has lost another one, and nothing runs after that."""
    if count() == 1:
        yield
        return
    which = f"Process {jax.process_index()} of {count()}, on {socket.gethostname()},"
    command = [sys.executable, "-I", "-S", watcher.__file__, which, str(folder)]
    # Ctrl-C does not reach another session.
    watching = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    except Exception:
        traceback.print_exc()
        # If another process was lost, JAX says which one and ends this one. If not, the others wait
        # for this one, and at a usual exit this one would wait for them.
        time.sleep(2 * HEARTBEAT)
        os._exit(1)
    finally:
        watching.kill()
        watching.wait()


def by_first(work: Callable[[], int]) -> int:
    """What `work` returns in the first process, a number from 0 on. The other processes do not call
    it. Where it exits, all processes exit."""
    if count() == 1:
        return work()
    result, end = -1, SystemExit("the first process has ended with an error")
    if is_first():
        try:
            result = work()
        except SystemExit as error:
            end = error
    result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
    if result < 0:
        raise end
    return result
