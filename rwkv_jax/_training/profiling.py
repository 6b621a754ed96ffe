"""Profiles of steps: what the devices did, as JAX records it for XProf and Perfetto."""

import sys
from pathlib import Path
from typing import Any

import jax

from rwkv_jax._training.clocks import Clock

STEPS = 3
"""How many steps a profile has."""

BEFORE = 7
"""How many steps of the run come before them."""


class Profile:
    """The profile of a run of so many steps. Neither the wait for the devices nor what writing it
    takes counts on the clock. If there is no folder for it, nothing is recorded."""

    def __init__(self, folder: Path | None, steps: int, clock: Clock):
        if folder and steps < BEFORE + STEPS:
            sys.exit(
                f"--profile records steps {BEFORE + 1} to {BEFORE + STEPS} of the run, and it has "
                f"{steps}"
            )
        self._folder, self._clock, self._records = folder, clock, False

    def after(self, taken: int, state: Any) -> None:
        """The run has taken so many steps, of which `state` is the last result."""
        if self._folder is None or taken not in (BEFORE, BEFORE + STEPS):
            return
        jax.block_until_ready(state)
        self._clock.stop()
        self.close()
        if taken == BEFORE:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._records = True
        self._clock.go()

    def close(self) -> None:
        if self._records:
            self._records = False
            jax.profiler.stop_trace()
