"""Timing of contestants in turn, and the speed of a copy on the device."""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarking.operands import WrongResult

BATCH_SECONDS = {"cpu": 0.02, "gpu": 0.2}


def seconds(loop: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    jax.block_until_ready(loop())
    return clock() - start


@dataclass(frozen=True)
class Contestant:
    name: str
    start: Callable[[], Sequence[Callable[[], Any]]]
    """Makes operands, checks results and returns the calls to be timed: one program with different
    operands. It may raise any exception."""
    clock: Callable[[Callable[[], Any]], float] = seconds
    """Runs a loop of calls, waits for the last one, and returns the seconds they took."""


@dataclass(frozen=True)
class Timing:
    ms: float | None = None
    """The median over batches of the milliseconds of one call; None if the contestant failed."""
    best_ms: float | None = None
    failure: str = ""


def reason_of(failure: Exception) -> str:
    """One line about an exception."""
    lines = str(failure).strip().splitlines() or [""]
    if isinstance(failure, WrongResult):
        return f"WRONG: {lines[0]}"
    return f"failed: {type(failure).__name__}: {lines[0][:200]}"


def _batch(contestant: Contestant, calls: Sequence[Callable[[], Any]], count: int) -> float:
    """Seconds for one call, from a batch of calls."""

    def loop() -> Any:
        result = None
        for i in range(count):
            result = calls[i % len(calls)]()
            if jax.default_backend() == "cpu":  # might run several calls at once
                jax.block_until_ready(result)
        return result

    return contestant.clock(loop) / count


def _ready(contestant: Contestant) -> Callable[[], float]:
    """A contestant's batch, with as many calls as fill `BATCH_SECONDS`."""
    calls = contestant.start()
    _batch(contestant, calls, 1)  # compiles
    count, target = 1, BATCH_SECONDS[jax.default_backend()]
    while (took := count * _batch(contestant, calls, count)) < target / 4:
        count *= 2
    return functools.partial(_batch, contestant, calls, math.ceil(count * target / took))


def time_in_turn(contestants: Sequence[Contestant], repeats: int) -> dict[str, Timing]:
    """Times batches of all contestants in turn, so that drift hits all alike. A contestant that
    fails is left out from then on."""
    failures: dict[str, str] = {}
    samples: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    batches: dict[str, Callable[[], float]] = {}
    for turn in range(1 + repeats):
        for contestant in contestants:
            name = contestant.name
            if name in failures:
                continue
            try:
                if turn == 0:
                    batches[name] = _ready(contestant)
                else:
                    samples[name].append(1e3 * batches[name]())
            except Exception as failure:
                failures[name] = reason_of(failure)
                batches.pop(name, None)  # frees its operands
    return {
        name: Timing(failure=failures[name])
        if name in failures
        else Timing(statistics.median(times), min(times))
        for name, times in samples.items()
    }


def copy_gb_s(clock: Callable[[], float] = time.perf_counter) -> float:
    """The speed of a large copy on the device, in bytes read plus bytes written."""
    size = {"cpu": 2**26, "gpu": 2**28}[jax.default_backend()]
    copy = jax.jit(lambda source, _: -source, donate_argnums=1, keep_unused=True)
    source, target = jnp.ones(size), jnp.ones(size)

    def loop() -> jax.Array:
        nonlocal target
        for _ in range(10):
            target = copy(source, target)
        return target

    seconds(loop)
    return 10 * 8 * size / statistics.median(seconds(loop, clock) for _ in range(5)) / 1e9
