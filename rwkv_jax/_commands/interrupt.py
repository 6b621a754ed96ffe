"""Ctrl-C while a model writes."""

import signal
from types import FrameType, TracebackType


class Interrupt:
    """A context in which the first Ctrl-C only sets `requested`, so that it cuts off no step of the
    model, after which the session would be lost. The second one raises KeyboardInterrupt."""

    requested = False

    def __enter__(self) -> "Interrupt":
        self._before = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
