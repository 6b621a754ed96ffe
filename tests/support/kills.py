"""Runs of training that kill themselves, each in a process of its own.

The processes are forked from one that has imported everything, but has not started JAX. Their steps
compute little, and they decode and draw nothing.
"""

import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.training import cheap_loss

WHEN = ("step", "writing", "before rename", "after rename", "removing")
"""Before a step is computed; while the files of a checkpoint are written; before and after it gets
its name; and when an older one is removed in part."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def start(argv: Sequence[str], when: str | None = None, delay: float = 0.0) -> int:
    """The exit code of a run, which is killed at a time of `WHEN`, if one is given: for "step"
    after so many steps of its own, for "writing" so many seconds after its first checkpoint was
    begun, and else with its first checkpoint."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rwkv_jax._training.run", "orbax.checkpoint", "tensorstore"])
    process = context.Process(target=_run, args=([*argv], when, delay))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _run(argv: list[str], when: str | None, delay: float) -> None:
    import jax

    from rwkv_jax._training import ahead, checkpoints, report, run, steps

    steps.mean_loss = cheap_loss
    report.sample = lambda *_: ""
    report.plot = lambda *_: None
    # A lock of tqdm would otherwise be left behind, with a warning at the end of the tests.
    multiprocessing.set_start_method("fork", force=True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if when == "step":
        taken = itertools.count()
        _before(ahead.Ahead, "take", lambda _: next(taken) < delay or kill())
    elif when == "writing":
        _before(checkpoints, "_write", lambda *_: threading.Timer(delay, kill).start())
    elif when == "removing":
        _before(shutil, "rmtree", _remove_in_part)
    elif when is not None:
        _before(os, "replace", functools.partial(_rename, when == "after rename"))
    sys.exit(run.main(argv))


def _before(module: Any, name: str, action: Callable[..., object]) -> None:
    """Do something before each call of a function."""
    function = getattr(module, name)

    def both(*args: Any, **options: Any) -> Any:
        action(*args)
        return function(*args, **options)

    setattr(module, name, both)


def _rename(first: bool, source: Path, target: Path) -> None:
    if Path(target).name.startswith("checkpoint."):
        if first:
            os.rename(source, target)
        kill()


def _remove_in_part(folder: Path, *_: Any) -> None:
    if Path(folder).name.startswith("checkpoint.") and (files := [*Path(folder).rglob("*")]):
        for file in filter(Path.is_file, files[::2]):
            file.unlink()
        kill()
