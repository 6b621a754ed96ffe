"""Ctrl-C, which ends training after the step under way."""

import signal
from types import FrameType, TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

TOGETHER = 10
"""After how many steps several processes ask each other whether one has been interrupted."""


class Interruption:
    """A context that takes note of Ctrl-C instead of stopping at once. A second Ctrl-C does stop at
    once."""

    def __enter__(self) -> "Interruption":
        self._noted = False
        self._usual = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._usual)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(signal.SIGINT, self._usual)

    def in_any_process(self, step: int) -> bool:
        """Whether any process has been interrupted. All processes have to ask together, after the
        same step; several processes find out after some steps only, because they have to wait for
        their devices to do so."""
        if jax.process_count() == 1:
            return self._noted
        if step % TOGETHER:
            return False
        return bool(multihost_utils.process_allgather(np.array(self._noted)).any())
