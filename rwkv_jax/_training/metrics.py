"""The metrics of a run, as lines of JSON and for TensorBoard."""

import contextlib
import importlib
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import jax

from rwkv_jax._training.outputs import METRICS, written

EVENTS = "tensorboard"
"""The folder of the files for TensorBoard."""


class Metrics:
    """Writes a line for each step, which has the values of all calls of `add` for it, when the next
    step has values or `flush` is called. The lines of a run that goes on after `saved` steps follow
    those of its earlier parts, and later steps of these are removed.

    Attributes:
      seconds: since the run began, without the time between its parts.
    """

    def __init__(self, folder: Path, saved: int, *, tensorboard: bool):
        self._folder, self._line, self._file, self._events = folder, {}, None, None
        earlier = 0.0
        with contextlib.ExitStack() as stack:
            if jax.process_index() == 0:
                with written(folder):
                    (folder / METRICS).touch()
                    self._file = stack.enter_context(open(folder / METRICS, "r+b", buffering=0))
                    earlier = _cut(self._file, saved)
                    if tensorboard:
                        self._events = _event_writer(folder / EVENTS, saved)
                        stack.callback(self._events.close)
            self._open = stack.pop_all()
        self._began = time.perf_counter() - earlier

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def add(self, step: int, **values: float) -> None:
        """The program exits where an earlier line cannot be written."""
        if step != self._line.get("step", step):
            self.flush()
        self._line |= {"step": step} | {name: float(f"{x:.7g}") for name, x in values.items()}

    def flush(self) -> None:
        line, self._line = self._line, {}
        if not line or self._file is None:
            return
        with written(self._folder):
            self._file.write(f"{json.dumps(line)}\n".encode())
            if self._events:
                step = line.pop("step")
                for name, x in line.items():
                    self._events.add_scalar(name, x, step)

    def close(self) -> None:
        with self._open:
            self.flush()


def _cut(file: BinaryIO, saved: int) -> float:
    """Remove all lines from the first one on that is not whole or of a later step than `saved`, and
    return the seconds of the last one that stays."""
    end, seconds = 0, 0.0
    for step, line_seconds, size in _lines(file):
        if step > saved:
            break
        end, seconds = end + size, line_seconds
    file.truncate(end)
    file.seek(end)
    return seconds


def _lines(file: BinaryIO) -> Iterator[tuple[int, float, int]]:
    """The step, the seconds and the size of each line, up to one that is not whole."""
    for line in file:
        try:
            values = json.loads(line)
            yield values["step"], values["seconds"], len(line)
        except (ValueError, KeyError, TypeError):
            return


def _event_writer(folder: Path, saved: int) -> Any:
    if not saved:
        shutil.rmtree(folder, ignore_errors=True)
    return importlib.import_module("tensorboardX").SummaryWriter(str(folder), purge_step=saved + 1)
