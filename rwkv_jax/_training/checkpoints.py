"""Checkpoints: folders with every array by its name, a record of the options and losses, and
checksums of all files."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import math
import operator
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, TypedDict

import jax
import numpy as np

from rwkv_jax._training.processes import by_first

if not importlib.util.find_spec("orbax.checkpoint"):
    raise ModuleNotFoundError("no checkpoint can be written", name="orbax-checkpoint")

RECORD = "record.json"

SUMS = "SHA256SUMS"
"""The checksums of the other files, as `sha256sum --check` reads them."""

CHECKSUMS = {
    "data": "other data; accepted are the same, of which some documents may have been mended",
    "model": "another model",
    "template": "another chat template",
    "tools": "other tools",
}
"""Options in whose place checkpoints have checksums of files."""

Options: TypeAlias = dict[str, Any]


class Log(TypedDict):
    """Losses in nats per token.

    Attributes:
      train: the loss of each step.
      held_out: pairs of a number of steps and the held-out loss after them.
      averaged: the same pairs for the average of what is trained.
      ngrams: held-out losses of other models, by name.
    """

    train: list[float]
    held_out: list[list[float]]
    averaged: list[list[float]]
    ngrams: dict[str, float]


def path(folder: Path, step: int) -> Path:
    """The checkpoint after so many steps."""
    return folder / f"checkpoint.{step}"


def steps(folder: Path) -> list[int]:
    """The numbers of steps of all checkpoints, the largest first."""
    names = (x.name.removeprefix("checkpoint.") for x in folder.glob("checkpoint.*") if x.is_dir())
    return sorted((int(x) for x in names if x.isdecimal() and x == str(int(x))), reverse=True)


def require_room(folder: Path, arrays: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """The program exits where the disk of a folder is too full for a checkpoint of such arrays."""

    def check() -> int:
        needed = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays.values())
        if (free := shutil.disk_usage(folder).free) < needed:
            sys.exit(
                f"--out {folder} has room for {free / 1e9:.3f} GB, and a checkpoint takes "
                f"{needed / 1e9:.3f} GB; accepted is a folder with more room"
            )
        return 0

    by_first(check)


class Saver:
    """A context in which checkpoints of a run are written to `folder`, and all of them are there at
    its end. The run began after `saved` steps. Of its checkpoints the newest `keep` are kept, and
    one more until it is known that the parameters of the newest one are numbers.

    A thread writes the checkpoint while training goes on. With several processes, which wait for
    each other to write one, `save` returns when it is written.
    """

    def __init__(self, folder: Path, options: Options, saved: int, keep: int = 2):
        self._folder, self._options, self._keep = folder, options, keep
        self._written = [step for step in steps(folder) if step <= saved]
        self._kept: set[int | None] = set()
        self._pool = ThreadPoolExecutor(1)
        self._writing: Future[list[int]] | None = None

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Only a second Ctrl-C does not wait.
        self._pool.shutdown(wait=isinstance(error, Exception | SystemExit | None))
        if error is None:
            self.wait()

    def check(self, known: int) -> None:
        """The losses of `known` steps are numbers. The program exits if a checkpoint could not be
        written."""
        if self._writing is not None and self._writing.done():
            self.wait()
        if self._kept and self._writing is None and known > max(self._written, default=known):
            if jax.process_index() == 0:
                _remove(self._folder, {*self._written} - self._kept)
            self._written = [step for step in self._written if step in self._kept]
            self._kept = set()

    def wait(self) -> None:
        """Until the last checkpoint is written."""
        if self._writing is not None:
            self._written = self._writing.result()
            self._writing = None

    def save(
        self,
        arrays: Mapping[str, jax.Array],
        log: Log,
        position: Any = None,
        *,
        best: int | None = None,
        sound: bool = False,
        last: bool = False,
    ) -> None:
        """Begin to write the checkpoint of all steps in `log`, when the one before is written. The
        arrays are no longer needed when this returns. `position` is that of the data. The
        parameters are known to be numbers if `sound`, and the run saves no more if `last`.

        Then all checkpoints are removed but the newest ones and the one after `best` steps. A
        checkpoint gets its name when it is complete. The program exits where the one before could
        not be written, unless the run had none at all then.
        """
        self.wait()
        record = json.dumps({"options": self._options, "log": log, "data": position})
        step = len(log["train"])
        self._kept = {step, *self._written[: self._keep - 1], best}
        keep = self._kept if sound else self._kept | {*self._written[:1]}
        write = functools.partial(_write, self._folder, step, record, self._written, keep, last)
        if jax.process_count() > 1:
            self._written = write(arrays)
            return
        for x in arrays.values():
            x.copy_to_host_async()
        # On a CPU the arrays of NumPy would otherwise be those of JAX, which the next step changes.
        copy = jax.default_backend() == "cpu"
        values = {name: np.array(x, copy=copy or None) for name, x in arrays.items()}
        self._writing = self._pool.submit(write, values)


def _write(
    folder: Path,
    step: int,
    record: str,
    written: Sequence[int],
    keep: Collection[int | None],
    last: bool,
    values: Mapping[str, jax.Array | np.ndarray],
) -> list[int]:
    """Write the checkpoint after so many steps, and return the numbers of steps of the checkpoints
    that there are then, the largest first: this one and those of `written` that are in `keep`.

    Where that fails, the program exits, unless this would be the first checkpoint and not the last.
    """
    unfinished, whole = folder / "unfinished", path(folder, step)
    kept = {step, *(x for x in written if x in keep)}
    try:
        with _checkpointer() as checkpointer:
            checkpointer.save(unfinished.absolute(), values, force=True)
        if jax.process_index() == 0:
            (unfinished / RECORD).write_text(record)
            (unfinished / SUMS).write_text(_sums(unfinished))
            # A checkpoint of that name is damaged, or of a run that --force replaces.
            shutil.rmtree(whole, ignore_errors=True)
            os.replace(unfinished, whole)
            _remove(folder, {*steps(folder)} - kept)
    except (OSError, ValueError) as error:  # TensorStore raises a ValueError where a disk is full
        message = f"{whole} cannot be written: {str(error).partition(' [')[0]}"
        if written:
            message += f"; --resume continues from {path(folder, written[0])}"
        elif jax.process_count() == 1 and not last:
            for part in folder.glob("unfinished*"):
                shutil.rmtree(part, ignore_errors=True)
            print(
                f"{message}; the run goes on and tries again at its next checkpoint. Until then no "
                "step is saved: make room, or end the run",
                file=sys.stderr,
            )
            return []
        else:
            message += "; the run has no checkpoint, and its steps are lost"
        if jax.process_count() > 1:
            # At a usual exit this process would wait for others, which may wait for this one.
            print(message, file=sys.stderr, flush=True)
            os._exit(1)
        sys.exit(message)
    return sorted(kept, reverse=True)


def _remove(folder: Path, numbers: Collection[int]) -> None:
    for step in numbers:
        shutil.rmtree(path(folder, step), ignore_errors=True)


def newest(folder: Path) -> int:
    """The number of steps of the newest checkpoint that is not damaged.

    The program exits where there is none.
    """
    if not steps(folder):
        sys.exit(f"{folder} has no checkpoint; run without --resume")
    for step in steps(folder):
        if (flaw := fault(path(folder, step))) is None:
            return step
        print(f"{path(folder, step)} is damaged: {flaw}; it is left out", file=sys.stderr)
    sys.exit(f"{folder} has no whole checkpoint; --force instead of --resume starts anew")


def record(folder: Path, step: int, options: Options) -> tuple[Log, Any]:
    """The log and the position of the data of a checkpoint.

    The program exits where its options are not `options`.
    """
    checkpoint = path(folder, step)
    found = json.loads((checkpoint / RECORD).read_text())
    for name, value in options.items():
        same = _same_data if name == "data" else operator.eq
        if not same(before := found["options"].get(name), value):
            differs = CHECKSUMS.get(name, f"{name} {before}, not {value}")
            sys.exit(f"{checkpoint} was made with {differs}")
    return found["log"], found["data"]


def _same_data(before: Any, now: Sequence[Sequence[int]]) -> bool:
    """Whether both are checksums of the same data, of which some documents may have been mended."""
    if not isinstance(before, list) or [x[:1] for x in before] != [x[:1] for x in now]:
        return False
    pairs = [list(map(operator.eq, *both)) for both in zip(before, now, strict=True)]
    return all(2 * sum(same[1:]) >= len(same[1:]) for same in pairs)


def load(
    folder: Path, step: int, shapes: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The arrays of a checkpoint, where the shapes of the same names say.

    The program exits where they have other names.
    """
    checkpoint = path(folder, step)
    with _checkpointer() as checkpointer:
        metadata: Any = checkpointer.metadata(checkpoint.absolute()).item_metadata
        if other := {*metadata.tree} ^ {*shapes}:
            sys.exit(
                f"{checkpoint} is of another version of this script: its arrays and those of this "
                f"version differ in {min(other)}; accepted is --force, which starts anew"
            )
        return checkpointer.restore(checkpoint.absolute(), dict(shapes))


@contextlib.contextmanager
def _checkpointer() -> Iterator[Any]:
    """One that saves before it returns. The threads of `ocp.StandardCheckpointer` keep a process
    alive for minutes after an error.

    An error is raised, and not also printed with the tracebacks of all threads, some of which end
    later than this context.
    """
    # The first step need not wait for it.
    import orbax.checkpoint as ocp

    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
            yield checkpointer
    except BaseException:
        sys.unraisablehook = functools.partial(_without_closed_loops, hook)
        raise
    else:
        sys.unraisablehook = hook


def _without_closed_loops(hook: Callable[[Any], object], unraisable: Any) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        hook(unraisable)


def _sums(folder: Path) -> str:
    """The checksums of all files but `SUMS`."""
    files = sorted(x for x in folder.rglob("*") if x.is_file() and x.name != SUMS)
    with ThreadPoolExecutor() as pool:
        lines = [
            f"{digest}  {file.relative_to(folder)}\n"
            for file, digest in zip(files, pool.map(_digest, files), strict=True)
        ]
    return "".join(lines)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def fault(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint."""
    try:
        texts = (checkpoint / SUMS).read_text(), _sums(checkpoint)
    except (OSError, ValueError) as error:
        return str(error)
    expected, actual = (set(text.splitlines(keepends=True)) for text in texts)
    # After a digest of 64 letters come two spaces and the name.
    names = [line[66:].strip() for line in expected ^ actual]
    return f"{min(names)!r} differs from {SUMS}" if names else None
