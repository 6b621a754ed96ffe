"""What is known of a run while it goes on: its log, its metrics, and what the screen shows."""

import argparse
import collections
import contextlib
import math
import sys
from collections.abc import Callable

import jax
import numpy as np
from tqdm import tqdm

from rwkv_jax._training.checkpoints import Log
from rwkv_jax._training.clocks import Clock, Start
from rwkv_jax._training.metrics import Metrics
from rwkv_jax._training.steps import Measures

IN_FLIGHT = 3
"""How many steps the device has been given beyond the last one whose loss is known."""


class Progress:
    """The steps that follow those of `log`. What a step measures is read when the device has done
    later steps, so that it never waits.

    Attributes:
      log: all losses that are known.
      clock: goes from the end of the first step on.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        log: Log,
        metrics: Metrics,
        start: Start,
        places: Callable[[int], str],
    ):
        """`places` says where the documents of the batch of one of the last steps are."""
        self.log, self.clock, self._places = log, Clock(), places
        self._patience = args.patience
        self._tokens, self._metrics, self._start = args.batch * args.context, metrics, start
        self._saved, self._lap = len(log["train"]), 0.0
        self._in_flight = collections.deque[Measures]()
        self._bar = tqdm(
            desc="training",
            unit="tok",
            unit_scale=True,
            total=args.steps * self._tokens,
            initial=self._saved * self._tokens,
            disable=jax.process_index() > 0,
        )

    def close(self) -> None:
        self._bar.close()

    def add(self, measures: Measures) -> None:
        """The device has been given one more step."""
        for x in measures:
            x.copy_to_host_async()
        self._in_flight.append(measures)
        self.read(IN_FLIGHT)

    def read(self, but: int = 0) -> None:
        """Read what all steps have measured but the last ones, which may be so many. The program
        exits where that is no number, before a checkpoint replaces a better one."""
        while len(self._in_flight) > but:
            loss, norm, learning_rate = map(float, self._in_flight.popleft())
            step = len(self.log["train"]) + 1
            self._require_number(step, "loss", loss)
            self._require_number(step, "norm of the gradients", norm)
            self.log["train"].append(loss)
            self._show()
            values = {"loss": loss, "gradient_norm": norm, "learning_rate": learning_rate}
            if (known := step - self._saved) == 1:
                self._start.part("first step")
                self.clock.go()
            else:
                now = self.clock.seconds
                values["tokens_per_second"] = self._tokens / (now - self._lap)
                self._lap = now
            if known == 2:
                self._start.part("second step")
                if not self._bar.disable:
                    self._bar.write(str(self._start))
            self._metrics.add(step, **values, seconds=self._metrics.seconds)

    def evaluated(self, loss: float, averaged: float | None) -> None:
        """The held-out losses after the last step, of the parameters and of their average."""
        step = len(self.log["train"])
        self._require_number(step, "held-out loss", loss)
        self.log["held_out"].append([step, loss])
        self._metrics.add(step, held_out_loss=loss)
        if averaged is not None:
            self.log["averaged"].append([step, averaged])
            self._metrics.add(step, average_held_out_loss=averaged)

    @property
    def best(self) -> int | None:
        """The step with the lowest held-out loss, the first one of several."""
        held_out = self.log["held_out"]
        return int(min(held_out, key=lambda pair: pair[1])[0]) if held_out else None

    @property
    def stagnates(self) -> bool:
        """Whether the last --patience held-out losses were not lower than one before."""
        later = [step for step, _ in self.log["held_out"] if step > (self.best or 0)]
        return bool(self._patience and len(later) >= self._patience)

    def _show(self) -> None:
        recent = f"loss {np.mean(self.log['train'][-20:]):.3f}"
        held_out = self.log["held_out"]
        held = f", held out {held_out[-1][1]:.3f}" if held_out else ""
        self._bar.set_postfix_str(recent + held, refresh=False)
        self._bar.update(self._tokens)

    def _require_number(self, step: int, name: str, value: float) -> None:
        if not math.isfinite(value):
            where = ""
            with contextlib.suppress(OSError, ValueError):
                where = self._places(step - 1)
            sys.exit(
                f"The {name} of step {step}, with batch {step - 1} of the data"
                f"{where and f' ({where})'}, is {value}; --resume repeats the steps after the last "
                "checkpoint. If it ends in the same way, remove that checkpoint to repeat those "
                "after the one before"
            )
