"""A request: a prompt, how it is continued, and what has come of it so far."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from rwkv_jax.generation import Sampling
from rwkv_jax.generation._sampling import NO_DISTRIBUTION, no_distribution
from rwkv_jax.generation._text import RowText

Reason: TypeAlias = Literal["length", "stop token", "stop string", "cancelled", "failed"]


class Request:
    """A sequence of a `Pool`, which `Pool.submit` makes.

    An iteration gives the tokens, and waits for those that have not come yet. Any number of threads
    may iterate, and each gets all tokens. Where no thread of the pool runs, waiting does the work
    of the pool.

    Attributes:
      prompt: the tokens of the prompt.
      max_new_tokens: the largest number of tokens.
      sampling: how tokens are chosen.
      seed: the seed.
      stop_tokens: the tokens that end the request.
      tokens: the tokens so far, without the stop token.
      finish_reason: why it has ended, or None: "length", "stop token", "stop string", "cancelled"
        or "failed".
      error: the exception of a request that has failed.
      cached: how many tokens of the prompt were not read, because a state after them was kept.
      submitted: when it was submitted, by `time.perf_counter`, in seconds.
      arrivals: when each token came, by the same clock.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        max_new_tokens: int,
        sampling: Sampling,
        seed: int,
        stop_tokens: Sequence[int],
        text: RowText | None,
        *,
        until: Callable[[Callable[[], bool], float | None], bool],
        cancel: Callable[["Request"], None],
    ):
        """A request. `until` waits until something is so, or for so many seconds, and returns
        whether it is."""
        self._text, self._until, self._cancel = text, until, cancel
        self.prompt, self.max_new_tokens = prompt, max_new_tokens
        self.sampling, self.seed = sampling, seed
        self.stop_tokens = stop_tokens
        self.tokens: list[int] = []
        self.finish_reason: Reason | None = None
        self.error: BaseException | None = None
        self.cached = 0
        self.submitted = time.perf_counter()
        self.arrivals: list[float] = []

    @property
    def text(self) -> str:
        """The text so far, up to a stop string. Half characters, and what a stop string may begin
        with, are held back.

        Raises:
          ValueError: the pool has no tokenizer.
        """
        if self._text is None:
            raise ValueError("Request: the pool has no tokenizer; accepted is Pool(tokenizer=...)")
        return self._text.text

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the submission to the first token; None before it."""
        return self.arrivals[0] - self.submitted if self.arrivals else None

    @property
    def times_between_tokens(self) -> list[float]:
        """Seconds from each token to the next. The tokens of one call come at once, so that most
        are 0 and some are the time of a call."""
        return np.diff(self.arrivals).tolist()

    def __iter__(self) -> Iterator[int]:
        """The tokens from the first one on.

        Raises:
          RuntimeError: the request failed, from the exception that ended it.
        """
        given = 0
        while self._more(lambda: len(self.tokens), given):
            yield self.tokens[given]
            given += 1

    def texts(self) -> Iterator[str]:
        """The text from its beginning on, in parts, as it becomes certain.

        Raises:
          ValueError: the pool has no tokenizer.
          RuntimeError: the request failed, from the exception that ended it.
        """
        given = 0
        while self._more(lambda: len(self.text), given):
            text = self.text[given:]
            yield text
            given += len(text)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the request ends, or for so many seconds, and return whether it has ended.

        Raises:
          RuntimeError: the request failed, from the exception that ended it.
        """
        ended = self._until(lambda: self.finish_reason is not None, timeout)
        self._check()
        return ended

    def cancel(self) -> None:
        """End the request after the tokens that it has. Its slot is free for others from the next
        scheduler step on."""
        self._cancel(self)

    def receive(self, tokens: Sequence[int], when: float) -> None:
        """The tokens of a call, or what `generation._decoding.decode` gives in place of them.

        Raises:
          Exception: what the request fails with.
        """
        for token in tokens:
            if self.finish_reason is not None:
                return
            if token == NO_DISTRIBUTION:
                raise no_distribution("the sequence", len(self.tokens))
            reason: Reason | None = "stop token" if token < 0 else None
            if token >= 0:
                self.tokens.append(token)
                self.arrivals.append(when)
                if len(self.tokens) == self.max_new_tokens:
                    reason = "length"
            if self._text is not None:
                self._text.push(None if token < 0 else token, reason is not None)
                if self._text.stopped:
                    reason = "stop string"
            self.finish_reason = reason

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        """End after the tokens so far, unless it has ended."""
        if self.finish_reason is not None:
            return
        if self._text is not None and error is None:
            self._text.push(None, True)
        self.finish_reason, self.error = reason, error

    def _more(self, size: Callable[[], int], given: int) -> bool:
        """Wait until there is more than what was given, and return whether there is."""
        self._until(lambda: size() > given or self.finish_reason is not None, None)
        if size() > given:
            return True
        self._check()
        return False

    def _check(self) -> None:
        if self.error is not None:
            raise RuntimeError(f"Request: the request failed: {self.error}") from self.error
