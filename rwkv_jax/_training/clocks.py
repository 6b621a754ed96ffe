"""How long things take: the parts of the start of a run, and the steps after it."""

import os
import time
from pathlib import Path

import jax


def _age() -> float:
    """The seconds since this process has begun, or 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    # The 22nd field of all is the first one in ticks since the system has started.
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began


class Start:
    """The seconds that each part of the start of a run takes since the process has begun, and how
    many programs the cache of `training.compilation` had."""

    def __init__(self):
        self._began = self._last = time.perf_counter() - _age()
        self._parts: list[str] = []
        self._cached = self._compiled = 0
        jax.monitoring.register_event_listener(self._note)

    def _note(self, event: str, **_: str | int) -> None:
        self._cached += event == "/jax/compilation_cache/cache_hits"
        self._compiled += event == "/jax/compilation_cache/cache_misses"

    def part(self, name: str) -> None:
        """The part of this name ends now."""
        now = time.perf_counter()
        self._parts.append(f"{name} {now - self._last:.1f}")
        self._last = now

    def __str__(self) -> str:
        return (
            f"{self._last - self._began:.1f} s until the second step: {', '.join(self._parts)}; "
            f"{self._cached} programs came from the cache, and {self._compiled} are new in it"
        )


class Clock:
    """A clock that stands still until `go`, and from `stop` to the next `go`."""

    def __init__(self):
        self._before, self._since = 0.0, None

    @property
    def seconds(self) -> float:
        """How long it went."""
        running = 0.0 if self._since is None else time.perf_counter() - self._since
        return self._before + running

    def go(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        self._before, self._since = self.seconds, None
