"""Ctrl-C and SIGTERM, which end training after the step under way."""

import signal
from types import FrameType, TracebackType

import jax
import numpy as np
from jax.experimental import multihost_utils

TOGETHER = 10
"""After how many steps several processes ask each other whether one has been interrupted."""


SIGNALS = signal.SIGINT, signal.SIGTERM
"""Those of Ctrl-C, and of a scheduler that takes the machine back."""


class Interruption:
    """A context that takes note of a signal instead of stopping at once. A second one of the same
    kind does stop at once."""

    def __enter__(self) -> "Interruption":
        self._noted = False
        self._usual = {x: signal.signal(x, self._note) for x in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, usual in self._usual.items():
            signal.signal(number, usual)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True
        signal.signal(number, self._usual[signal.Signals(number)])

    def in_any_process(self, step: int) -> bool:
        """Whether any process has been interrupted. All processes have to ask together, after the
        same step; several processes find out after some steps only, because they have to wait for
        their devices to do so."""
        if jax.process_count() == 1:
            return self._noted
        if step % TOGETHER:
            return False
        return bool(multihost_utils.process_allgather(np.array(self._noted)).any())
