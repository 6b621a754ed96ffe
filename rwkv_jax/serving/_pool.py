"""The pool: what a server calls, and the threads that do the scheduler steps."""

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.typing import DTypeLike

from rwkv_jax import tokenizers
from rwkv_jax._operator import check
from rwkv_jax._operator.partition import check_places
from rwkv_jax.generation import Sampling
from rwkv_jax.generation._decoding import MOST_STEPS
from rwkv_jax.generation._prefill import check_chunks
from rwkv_jax.generation._sampling import check_tokens, checked
from rwkv_jax.generation._session import MOST_TOKENS, Model, initial_state_of, seeds_of_rows
from rwkv_jax.generation._text import RowText, check_stop
from rwkv_jax.models._invariant import Invariant, of_module
from rwkv_jax.models._kernels import Kernels, chosen
from rwkv_jax.models._placement import MeshAxes
from rwkv_jax.serving._request import Request
from rwkv_jax.serving._scheduler import Plan, Scheduler, Totals
from rwkv_jax.serving._slots import Placement, devices_along


class Pool:
    """Decodes many sequences at once, which come and go, with one program for all slots.

    A scheduler step gives free slots to the requests that have waited longest, reads a chunk of a
    prompt, and decodes some tokens of all sequences whose prompts are read. `step` does one
    scheduler step, `run` does them until there is nothing left to do, and `start` has a thread do
    them. Waiting for a request also does scheduler steps, unless such a thread does. All methods
    may be called from any thread.

    The tokens of a request depend on its prompt, its seed and its settings. They do not depend on
    the other requests, on the slot, on the order of arrival or on kept states, bit for bit on CPUs,
    and otherwise wherever a product of matrices computes a row in the same way at every place.
    A pool with other numbers may round logits in another way, unless it has a `models.Invariant`.

    A request fails alone where no token can be sampled: a logit is NaN or +inf, or all of them are
    -inf. If a scheduler step raises an exception, the requests that have slots fail with it, and
    those that wait for one go on in later scheduler steps.

    Args:
      module: the module of the model: `rwkv_jax.models.rwkv7`, `rwkv6`, `rwkv5` or `rwkv4`; or a
        `models.Invariant` of it.
      params: the parameters, in either form, on any devices.
      slots: how many sequences are decoded at once.
      tokenizer: as `tokenizers.load` gives it, for prompts that are text, stop strings, and the
        text of requests.
      state: what every sequence starts from, a state of one row in the form of `params`, such as
        `models.load_state` gives; the state before any token if None.
      prefill_chunks: the lengths of the chunks in which prompts are read, in tokens. For each of
        them that occurs a program is compiled.
      readers: how many prompts are read side by side.
      steps: how many tokens of each sequence a scheduler step decodes, from 1 to 32. While prompts
        are read it is a quarter of them, so that a sequence waits for fewer before it can join the
        others.
      cache_bytes: memory for states by the beginning of a prompt; 0 to keep none.
      mesh: a mesh with axes of type Auto, over which the slots are distributed.
      data: mesh axes that split the slots.
      model: mesh axes that split the heads and the vocabulary, as `shardings` of the model takes
        them.
      dtype: the dtype of the activations.
      kernels: as `TokenStream` takes it.

    Raises:
      TypeError: a number is no integer; or `params` are not those of a model of `module`; or
        `tokenizer` is none.
      ValueError: a number is not accepted; or an axis is not one of the mesh, or the mesh has
        Explicit axes; or `data` has a number of devices that does not divide `slots`; or `state` is
        not one of the model.
    """

    def __init__(
        self,
        module: ModuleType | Invariant,
        params: Any,
        slots: int,
        *,
        tokenizer: tokenizers.Tokenizer | None = None,
        state: Any = None,
        prefill_chunks: Sequence[int] = (16, 64),
        readers: int = 1,
        steps: int = 8,
        cache_bytes: int = 2**28,
        mesh: Mesh | None = None,
        data: MeshAxes = None,
        model: MeshAxes = None,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
    ):
        check.number("Pool", "slots", slots, 1)
        check.number("Pool", "readers", readers, 1, slots)
        check.number("Pool", "steps", steps, 1, MOST_STEPS)
        check.number("Pool", "cache_bytes", cache_bytes, 0)
        params = of_module("Pool", module).checked(params)
        prefill_chunks = check_chunks("Pool", prefill_chunks)
        if not isinstance(tokenizer, tokenizers.Tokenizer | None):
            raise TypeError(
                f"Pool: tokenizer is {tokenizer!r}; accepted are None and a tokenizers.Tokenizer"
            )
        for argument, axes in {"data": data, "model": model}.items():
            if mesh is None and axes is not None:
                raise ValueError(f"Pool: {argument} is {axes!r}; accepted without mesh is None")
        if mesh is not None:
            check_places("Pool", mesh, {"data": data, "model": model})
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise ValueError(f"Pool: mesh is {mesh}; accepted is one with axes of type Auto")
        if mesh is not None and slots % (parts := devices_along(mesh, data)):
            raise ValueError(
                f"Pool: slots is {slots}; accepted is a multiple of {parts}, the devices of data"
            )
        placement = None if mesh is None else Placement(mesh, data, model)
        used = Model(module, jnp.dtype(dtype), chosen("Pool", kernels))
        plan = Plan(slots, prefill_chunks, readers, steps, cache_bytes, placement)
        self._scheduler = Scheduler(
            used, params, initial_state_of("Pool", used, params, state), plan
        )
        self._vocabulary, self._tokenizer = len(params.head.weight), tokenizer
        self._closed = False
        self._thread: threading.Thread | None = None
        self._stepping = threading.Lock()

    def submit(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        seed: int = 0,
        stop_tokens: Sequence[int] = (),
        stop: Sequence[str] = (),
    ) -> Request:
        """A new request, which waits until a slot is free.

        Args:
          prompt: tokens, or a text for the tokenizer. It may be of any length.
          max_new_tokens: the largest number of new tokens, from 1 to 2^31 - 1 less those of the
            prompt.
          sampling: how tokens are chosen, with one number for each setting; `Sampling()` if None.
          seed: an integer from 0 to 2^31 - 1.
          stop_tokens: tokens that end the request. They are neither given nor read.
          stop: texts before which the text of the request ends.

        Raises:
          TypeError: `prompt`, `max_new_tokens`, `sampling` or `seed` has a type that is not
            accepted.
          ValueError: the prompt is empty; or a token is not in the vocabulary; or
            `max_new_tokens`, `seed` or a setting is not accepted; or a text is given and the pool
            has no tokenizer.
          RuntimeError: the pool is closed.
        """
        if isinstance(prompt, str):
            prompt = self._tokenizer_for("prompt", prompt).encode(prompt)
        tokens = check_tokens("submit", "prompt", prompt)
        if not tokens.size:
            raise ValueError("submit: prompt is empty; accepted is at least one token")
        if tokens.max() >= self._vocabulary:
            raise ValueError(
                f"submit: prompt has the token {tokens.max()}; accepted are tokens below "
                f"{self._vocabulary}"
            )
        check.number("submit", "max_new_tokens", max_new_tokens, 1, MOST_TOKENS - len(tokens))
        sampling = checked("submit", sampling)
        if stops := check_stop("submit", stop):
            self._tokenizer_for("stop", stops)
        text = None if self._tokenizer is None else RowText(self._tokenizer, stops)
        (number,) = seeds_of_rows("submit", [seed], 1)
        request = Request(
            *(
                tokens,
                max_new_tokens,
                sampling,
                int(number),
                tuple(stop_tokens),
                text,
            ),
            until=self._until,
            cancel=self._cancel,
        )
        self._scheduler.controls(request.sampling, request.stop_tokens)
        with self._scheduler.changed:
            if self._closed:
                raise RuntimeError("submit: the pool is closed")
            self._scheduler.queue.append(request)
            self._scheduler.changed.notify_all()
        return request

    def step(self) -> bool:
        """Do one scheduler step, and return whether there is anything left to do.

        Raises:
          Exception: what failed in the scheduler step. The requests that had slots have failed.
        """
        with self._stepping:
            self._scheduler.step()
        return self._scheduler.busy

    def run(self) -> None:
        """Do scheduler steps until all requests have ended.

        Raises:
          Exception: what failed in a scheduler step. The requests that wait for a slot are still
            there.
        """
        while self.step():
            pass

    def start(self) -> None:
        """Have a thread do scheduler steps until `close`. A scheduler step that fails ends its
        requests, which raise the error.

        Raises:
          RuntimeError: there is such a thread, or the pool is closed.
        """
        with self._scheduler.changed:
            if self._closed or self._thread is not None:
                raise RuntimeError("start: the pool is closed or has a thread")
            thread = threading.Thread(target=self._work, name="rwkv_jax.serving", daemon=True)
            # Before `close` can wait for its end.
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """Cancel all requests that have not ended, and end the thread. A closed pool accepts no
        requests."""
        with self._scheduler.changed:
            self._closed = True
            for request in (*self._scheduler.queue, *self._scheduler.running):
                request.end("cancelled")
            self._scheduler.queue.clear()
            self._scheduler.changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def totals(self) -> Totals:
        """What the pool has done so far."""
        return self._scheduler.totals

    @property
    def waiting(self) -> int:
        """How many requests wait for a slot."""
        return len(self._scheduler.queue)

    @property
    def running(self) -> int:
        """How many requests have slots and have not ended."""
        return len(self._scheduler.running)

    def _until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Do scheduler steps, or have the thread do them, until `ready` or for so many seconds. The
        result is that of `ready`."""
        end = None if timeout is None else time.monotonic() + timeout
        while self._thread is None and not ready():
            if end is not None and time.monotonic() >= end:
                return False
            self._attempt()
        with self._scheduler.changed:
            left = None if end is None else end - time.monotonic()
            return self._scheduler.changed.wait_for(ready, left)

    def _cancel(self, request: Request) -> None:
        """A request leaves the queue or, at the next scheduler step, its slot."""
        with self._scheduler.changed:
            request.end("cancelled")
            if request in self._scheduler.queue:
                self._scheduler.queue.remove(request)
            self._scheduler.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._scheduler.changed:
                self._scheduler.changed.wait_for(lambda: self._closed or self._scheduler.busy)
                if self._closed:
                    return
            self._attempt()

    def _attempt(self) -> None:
        """A scheduler step whose error those get whose requests it ends."""
        try:
            self.step()
        except Exception:
            return

    def _tokenizer_for(self, argument: str, given: object) -> tokenizers.Tokenizer:
        if self._tokenizer is None:
            raise ValueError(
                f"submit: {argument} is {given!r}; accepted without Pool(tokenizer=...) are tokens"
            )
        return self._tokenizer
