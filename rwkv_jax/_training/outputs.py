"""The folder that a run writes to."""

import argparse
import contextlib
import fcntl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from rwkv_jax._training import checkpoints
from rwkv_jax._training.processes import by_first

MODEL, AVERAGE, LOG, PLOT = "model.safetensors", "ema.safetensors", "log.json", "loss.png"
"""Files of a finished run."""

METRICS = "metrics.jsonl"
"""A file of a run from its begin on."""


@contextlib.contextmanager
def reserved(args: argparse.Namespace) -> Iterator[int]:
    """A context in which no other run writes to --out, with the number of steps after which the run
    goes on: 0, or that of the newest checkpoint with --resume.

    The program exits where the folder cannot be written to, is in use, or has results that neither
    --resume nor --force lets the run replace.
    """
    with contextlib.ExitStack() as lock:

        def first() -> int:
            with written(args.out):
                args.out.mkdir(parents=True, exist_ok=True)
                _lock(lock.enter_context(open(args.out / "lock", "a")), args.out)
                tempfile.TemporaryFile(dir=args.out).close()
                for name in _present(args.out, METRICS):
                    open(args.out / name, "r+b").close()
            if args.resume:
                return checkpoints.newest(args.out)
            if not args.force:
                _check_empty(args.out)
            return 0

        yield by_first(first)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """A context that writes to a folder. The program exits where that fails."""
    try:
        yield
    except OSError as error:
        sys.exit(f"--out {folder} cannot be written to: {error}")


def _lock(file: IO[str], folder: Path) -> None:
    """Lock the file of a folder. The system unlocks it when the process ends, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"--out {folder} is in use by another run; accepted is another folder")
    except OSError as error:
        print(f"--out {folder} has no lock ({error}); start no other run in it", file=sys.stderr)


def _present(folder: Path, *more: str) -> list[str]:
    """The files of a finished run in the folder, and those of `more`."""
    return [name for name in (MODEL, AVERAGE, LOG, PLOT, *more) if (folder / name).exists()]


def _check_empty(folder: Path) -> None:
    names = [checkpoints.path(folder, step).name for step in checkpoints.steps(folder)]
    if names := [*names, *_present(folder)]:
        sys.exit(
            f"--out {folder} has {names[0]} of an earlier run; accepted are --resume, which "
            "continues that run, --force, which replaces it, and another folder"
        )
