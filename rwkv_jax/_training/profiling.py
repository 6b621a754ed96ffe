"""Profiles of steps: what the devices did, as JAX records it for XProf and Perfetto."""

import sys
import tempfile
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
    takes counts on the clock. If there is no folder for it, nothing is recorded.

    The program exits where there are too few steps, or the folder cannot be written to.
    """

    def __init__(self, folder: Path | None, steps: int):
        self._folder, self._records = folder, False
        if folder is None:
            return
        if steps < BEFORE + STEPS:
            sys.exit(
                f"--profile records steps {BEFORE + 1} to {BEFORE + STEPS} after the start or "
                f"--resume; this run takes {steps} steps"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            sys.exit(f"--profile {folder} cannot be written to: {error}")

    def after(self, taken: int, state: Any, clock: Clock) -> None:
        """The run has taken so many steps, of which `state` is the last result."""
        if self._folder is None or taken not in (BEFORE, BEFORE + STEPS):
            return
        jax.block_until_ready(state)
        clock.stop()
        self.close()
        if taken == BEFORE:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._records = True
        clock.go()

    def close(self) -> None:
        """Write what has been recorded. Training goes on where that fails, as on a full disk."""
        if not self._records:
            return
        self._records = False
        try:
            jax.profiler.stop_trace()
        except jax.errors.JaxRuntimeError as error:
            print(f"--profile {self._folder} has no profile: {error}", file=sys.stderr)
