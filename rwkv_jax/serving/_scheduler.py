"""The scheduler of a pool: slots for requests, prefill chunks, and tokens."""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rwkv_jax.generation import Sampling
from rwkv_jax.generation._decoding import Controls
from rwkv_jax.generation._sampling import mask, settings
from rwkv_jax.generation._session import Model
from rwkv_jax.serving import _slots
from rwkv_jax.serving._prefixes import PrefillChunk, Prefixes, cut
from rwkv_jax.serving._request import Request


class Plan(NamedTuple):
    """The numbers and the placement of a pool, as `Pool` describes them."""

    slots: int
    chunks: Sequence[int]
    readers: int
    steps: int
    cache_bytes: int
    placement: _slots.Placement | None


class Totals(NamedTuple):
    """What a pool has done so far.

    Attributes:
      read: tokens of prompts that were read.
      cached: tokens of prompts that were not read, because a state after them was kept.
      written: tokens that requests got.
      steps: scheduler steps.
      seconds: the time of the scheduler steps.
    """

    read: int
    cached: int
    written: int
    steps: int
    seconds: float


@dataclasses.dataclass
class _Sequence:
    """A request in a slot, and the prefill chunks of its prompt that it has not read. Before it
    reads the first of them, it starts from the state before any token or from a kept one."""

    request: Request
    chunks: deque[PrefillChunk]
    started: bool = False


class Scheduler:
    """The requests of a pool, and the work on them.

    Whoever changes the queue, or a request, has `changed`. One thread at a time does a scheduler
    step.

    Attributes:
      queue: the requests that wait for a slot, the one that has waited longest first.
      changed: the lock of the queue and of requests, which tells whoever waits for a change.
      totals: what the scheduler steps have done so far.
    """

    def __init__(self, model: Model, params: Any, initial: Any, plan: Plan):
        """No requests yet. Sequences start from the state `initial` of one row."""
        self._model, self._params, self._plan = model, params, plan
        self._vocabulary = len(params.head.weight)
        self._initial = _slots.placed(initial, plan.placement, slots=False)
        self._prefixes = Prefixes(plan.cache_bytes)
        self._slots: _slots.Slots | None = None
        # By slots. The first sequence is the one that got a slot first.
        self._sequences: dict[int, _Sequence] = {}
        self.queue: deque[Request] = deque()
        self.changed = threading.Condition()
        self.totals = Totals(0, 0, 0, 0, 0.0)

    @property
    def running(self) -> list[Request]:
        """The requests that have slots and have not ended."""
        with self.changed:
            requests = [sequence.request for sequence in self._sequences.values()]
            return [request for request in requests if request.finish_reason is None]

    @property
    def busy(self) -> bool:
        """Whether there is anything left to do."""
        return bool(self.queue or self.running)

    def step(self) -> None:
        """Do a scheduler step.

        Raises:
          Exception: what failed in the scheduler step. The requests that had slots have failed.
        """
        begin = time.perf_counter()
        try:
            self._admit()
            slots = self._empty() if self._slots is None else self._slots
            self._slots = self._decode(self._read(slots))
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._count(steps=1, seconds=time.perf_counter() - begin)

    def controls(self, sampling: Sampling, stop_tokens: Sequence[int]) -> Controls:
        """The settings of a request, as a slot has them.

        Raises:
          ValueError: a setting or a stop token is not accepted.
        """
        return Controls(
            settings(sampling, 1, self._vocabulary),
            mask("submit", "stop_tokens", stop_tokens, 1, self._vocabulary),
        )

    def _admit(self) -> None:
        """Give the slots of requests that have ended, and free ones, to the requests that have
        waited longest."""
        with self.changed:
            for slot, sequence in list(self._sequences.items()):
                if sequence.request.finish_reason is not None:
                    del self._sequences[slot]
            free = sorted(set(range(self._plan.slots)) - self._sequences.keys())
            for slot in free[: len(self.queue)]:
                chunks = deque(cut(self.queue[0].prompt, self._plan.chunks))
                self._sequences[slot] = _Sequence(self.queue.popleft(), chunks)

    def _read(self, slots: _slots.Slots) -> _slots.Slots:
        """Read a prefill chunk of each of up to `readers` prompts, those that got a slot first. The
        prefill chunks are as long as that of the first of them."""
        reading = [(slot, x) for slot, x in self._sequences.items() if x.chunks]
        if not reading:
            return slots
        reading = reading[: self._plan.readers]
        for slot, sequence in reading:
            if not sequence.started:
                slots = self._start(slots, slot, sequence)
        length = reading[0][1].chunks[0].length
        reading = [(slot, x) for slot, x in reading if x.chunks[0].length == length]
        rows = np.full(self._plan.readers, self._plan.slots, np.int32)
        tokens = np.zeros((self._plan.readers, length), np.int32)
        lengths = np.zeros(self._plan.readers, np.int32)
        for row, (slot, sequence) in enumerate(reading):
            part = sequence.chunks[0].tokens
            rows[row], lengths[row] = slot, len(part)
            tokens[row, : len(part)] = part
        slots = _slots.read(
            *(self._model, self._params, slots, rows, tokens, lengths),
            placement=self._plan.placement,
        )
        self._count(read=int(lengths.sum()))
        for slot, sequence in reading:
            key = sequence.chunks.popleft().key
            if sequence.chunks and self._prefixes.wants(key):
                state = _slots.state_of(slots, np.int32(slot), placement=self._plan.placement)
                self._prefixes.keep(key, state)
        return slots

    def _start(self, slots: _slots.Slots, slot: int, sequence: _Sequence) -> _slots.Slots:
        """A sequence goes on from the longest beginning of its prompt after which there is a
        state."""
        request, sequence.started = sequence.request, True
        number, state = self._prefixes.find(list(sequence.chunks))
        request.cached = sum(len(sequence.chunks.popleft().tokens) for _ in range(number))
        self._count(cached=request.cached)
        begin = _slots.Start(
            state=self._initial if state is None else state,
            position=np.int32(request.cached),
            seed=np.int32(request.seed),
            controls=self.controls(request.sampling, request.stop_tokens),
        )
        return _slots.start(slots, np.int32(slot), begin, placement=self._plan.placement)

    def _decode(self, slots: _slots.Slots) -> _slots.Slots:
        """Decode tokens of all sequences whose prompts are read. If requests wait for a slot, the
        call ends when one is free."""
        left, reading = np.zeros(self._plan.slots, np.int32), False
        for slot, sequence in self._sequences.items():
            if sequence.chunks:
                reading = True
            else:
                left[slot] = sequence.request.max_new_tokens - len(sequence.request.tokens)
        running = np.flatnonzero(left)
        if not running.size:
            return slots
        slots, tokens, count = _slots.decode(
            *(self._model, self._params, slots, left),
            steps=np.int32(max(1, self._plan.steps // 4) if reading else self._plan.steps),
            min_active_rows=np.int32(running.size if self.queue else 1),
            placement=self._plan.placement,
        )
        tokens, count = jax.device_get((tokens, count))
        sampled = tokens[: int(count)]
        when = time.perf_counter()
        self._count(written=int(np.sum(sampled >= 0)))
        with self.changed:
            for slot in running.tolist():
                request = self._sequences[slot].request
                try:
                    request.receive(sampled[:, slot].tolist(), when)
                except Exception as error:
                    request.end("failed", error)
            self.changed.notify_all()
        return slots

    def _fail(self, error: BaseException) -> None:
        """All requests that have slots fail, because the error may have deleted the slots. Nor can
        kept states be trusted: they may be results of the program that failed."""
        with self.changed:
            for sequence in self._sequences.values():
                sequence.request.end("failed", error)
            self._sequences.clear()
            self._slots = None
            self._prefixes.clear()
            self.changed.notify_all()

    def _empty(self) -> _slots.Slots:
        controls = self.controls(Sampling(), ())
        return _slots.empty(
            self._model, self._params, self._plan.slots, controls, self._plan.placement
        )

    def _count(self, **more: int | float) -> None:
        counts = {name: getattr(self.totals, name) + x for name, x in more.items()}
        self.totals = self.totals._replace(**counts)
