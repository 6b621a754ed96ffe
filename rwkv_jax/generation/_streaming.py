"""Tokens as they come, and all of them at once."""

import collections
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from rwkv_jax._operator import check
from rwkv_jax.generation import _decoding, _log_probs, _prefill, _session
from rwkv_jax.generation._log_probs import LogProbs
from rwkv_jax.generation._prefill import PREFILL_CHUNKS
from rwkv_jax.generation._sampling import (
    NO_DISTRIBUTION,
    Sampling,
    check_tokens,
    checked,
    mask,
    no_distribution,
    settings,
)
from rwkv_jax.generation._session import MOST_TOKENS, Model, Session
from rwkv_jax.models._invariant import Invariant, of_module
from rwkv_jax.models._kernels import Kernels, chosen

Reason: TypeAlias = Literal["length", "stop token", "stopped", "failed"]
"""Why a row has ended: it has `max_new_tokens`, it sampled one of `stop_tokens`, the caller of
`TokenStream.stop` stopped it, or its logits are NaN or infinite."""

_Sampled: TypeAlias = tuple[Array | np.ndarray, Array | int, _log_probs.Steps | None]
"""The tokens of a call, how many steps they took, and their log probabilities."""


class TokenStream(Iterator[list[int | None]]):
    """The tokens that continue prompts, one of each row at a time.

    The prompts are read when the stream is made. An iteration gives a list with a token of each
    row, or None for a row that has ended. A row fails where no token can be sampled, because a
    logit is NaN or +inf, or because all of them are -inf. The other rows go on, and after them the
    iteration ends with a FloatingPointError. Any other exception within an iteration, such as
    KeyboardInterrupt, may leave the stream without its session.

    Args:
      module: the module of the model: `rwkv_jax.models.rwkv7`, `rwkv6`, `rwkv5` or `rwkv4`; or a
        `models.Invariant` of it.
      params: the parameters, in either form, on any devices.
      prompts: tokens for each row. With a session a prompt may be empty: such a row goes on as if
        it had never been interrupted. Penalties count the tokens since a row's last prompt.
      max_new_tokens: the largest number of new tokens of a row. With those that it has had in
        `session` and those of its prompt, a row may have up to 2^31 - 1.
      sampling: how tokens are chosen; `Sampling()` if None.
      seed: an integer from 0 to 2^31 - 1 for each row; or one for the first row, whose successors
        are the seeds of the other rows. None takes the seeds of `session`, or 0. The tokens of a
        row depend on its prompt, on its seed and on the settings, and not on other rows, but for
        rounding of the logits.
      stop_tokens: tokens that end a row. They are neither given nor read.
      session: what the prompts continue; None for a new session.
      state: what every row starts from, a state of one row in the form of `params`, such as
        `models.load_state` gives; the state before any token if None. Not with a session.
      prefill_chunks: the lengths of the chunks in which prompts are read, in tokens. For each of
        them that occurs a program is compiled.
      dtype: the dtype of the activations, that of the session if there is one.
      kernels: as `hidden_states` takes it. Fused blocks read new tokens, but prompts only with an
        `Invariant`.
      logprobs: None, or for how many of the most probable tokens of each step their log
        probabilities are given beside that of the chosen one, from 0 to the size of the
        vocabulary. For each number a program is compiled.

    Attributes:
      tokens: the tokens of each row so far.
      logprobs: None, or a `LogProbs` for each of `tokens`.
      finish_reasons: why each row has ended, or None: "length", "stop token", "stopped" or
        "failed".

    Raises:
      TypeError: tokens, seeds, lengths of chunks or `max_new_tokens` are no integers; or `sampling`
        is no `Sampling`; or `params` are not those of a model of `module`.
      ValueError: there is no prompt; or the first prompt of a row is empty; or tokens are not in
        the vocabulary; or `max_new_tokens` or `logprobs` is negative or too large; or the settings,
        the seeds or the session are for another number of rows; or a length of a chunk is not
        positive; or the session or the state is not one of this model.
    """

    def __init__(
        self,
        module: ModuleType | Invariant,
        params: Any,
        prompts: Sequence[Sequence[int] | np.ndarray],
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        seed: int | Sequence[int] | None = None,
        stop_tokens: Sequence[int] = (),
        session: Session | None = None,
        state: Any = None,
        prefill_chunks: Sequence[int] = PREFILL_CHUNKS,
        dtype: DTypeLike = jnp.float32,
        kernels: Kernels | str | None = None,
        logprobs: int | None = None,
    ):
        params = of_module("generate", module).checked(params)
        model = Model(module, jnp.dtype(dtype), chosen("generate", kernels))
        vocabulary, batch = len(params.head.weight), len(prompts)
        if batch == 0:
            raise ValueError("generate: there are no prompts; accepted is one for each row")
        check.number("generate", "max_new_tokens", max_new_tokens, 0, MOST_TOKENS)
        if logprobs is not None:
            check.number("generate", "logprobs", logprobs, 0, vocabulary)
        prefill_chunks = _prefill.check_chunks("generate", prefill_chunks)
        rows = [check_tokens("generate", "a prompt", prompt) for prompt in prompts]
        for row, prompt in enumerate(rows):
            if prompt.size and prompt.max() >= vocabulary:
                raise ValueError(
                    f"generate: the prompt of row {row} has the token {prompt.max()}; accepted are "
                    f"tokens below {vocabulary}"
                )
        if session is None:
            if empty := [row for row, prompt in enumerate(rows) if not prompt.size]:
                raise ValueError(
                    f"generate: the prompt of row {empty[0]} is empty; accepted is at least one "
                    "token where no session goes on"
                )
            seed = 0 if seed is None else seed
        elif state is not None:
            raise ValueError("generate: state with a session; accepted is None for one of them")
        controls = _decoding.Controls(
            settings(checked("generate", sampling), batch, vocabulary),
            mask("generate", "stop_tokens", stop_tokens, batch, vocabulary),
        )
        self._controls = jax.tree.map(jnp.asarray, controls)
        seeds = None if seed is None else _session.seeds_of_rows("generate", seed, batch)
        own = _session.own(model, params, batch, session, state)
        had = 0 if session is None else np.asarray(session.positions, np.int64)
        total = had + np.array([len(prompt) for prompt in rows]) + max_new_tokens
        if total.max() > MOST_TOKENS:
            raise ValueError(
                f"generate: row {total.argmax()} would have {total.max()} tokens, with those that "
                f"session has had, the prompt and max_new_tokens = {max_new_tokens}; accepted are "
                f"up to {MOST_TOKENS}"
            )
        if seeds is not None:
            own = own._replace(seeds=jnp.asarray(seeds))
        self._model, self._params = model, params
        self._left, self._number = max_new_tokens, logprobs
        self._active = np.full(batch, max_new_tokens > 0)
        self._session = _prefill.read(model, params, own, rows, prefill_chunks)
        self.tokens: list[list[int]] = [[] for _ in rows]
        self.logprobs: list[list[LogProbs]] | None = (
            None if logprobs is None else [[] for _ in rows]
        )
        self.finish_reasons: list[Reason | None] = [
            None if max_new_tokens else "length" for _ in rows
        ]

    @property
    def session(self) -> Session:
        """The session after the tokens so far, a copy that this stream will not change. A row that
        has ended has read the tokens that it gave, all of them and no other."""
        return _session.copied(self._session)

    def stop(self, row: int) -> None:
        """End a row, after the tokens that it has given."""
        if self._active[row]:
            self._end(row, "stopped")

    def __next__(self) -> list[int | None]:
        if not self._active.any():
            self._check()
            raise StopIteration
        (given,) = self._taken(self._decoded(self._left))
        return given

    def run(self) -> None:
        """Go on to the end of all rows, in calls of many tokens: faster than one at a time."""
        # The device is given a call before the tokens of the one before it are here. Where a row
        # has ended in that one, it samples what ended it once more.
        calls, left = collections.deque[_Sampled](), self._left
        while self._active.any():
            while left > 0 and len(calls) < 2:
                calls.append(self._decoded(left, all_steps=True))
                left -= _decoding.STEPS
            self._taken(calls.popleft())
        self._check()

    def _decoded(self, left: int, *, all_steps: bool = False) -> _Sampled:
        """Start a call of one step, or of all steps, in which each row may have `left` tokens."""
        self._session, *sampled = _decoding.decode(
            *(self._model, self._params, self._session, self._controls),
            np.where(self._active, np.int32(left), np.int32(0)),
            steps=np.int32(1),
            min_active_rows=np.int32(1),
            defers=True,
            all_steps=all_steps,
            logprobs=self._number,
        )
        return tuple(sampled)

    def _taken(self, sampled: _Sampled) -> list[list[int | None]]:
        """What the iterations give whose steps a call samples."""
        tokens, count, found = jax.device_get(sampled)
        given = []
        for step, row_tokens in enumerate(tokens[: int(count)].tolist()):
            given.append(self._given(row_tokens))
            if self.logprobs is not None:
                for row, token in enumerate(given[-1]):
                    if token is not None:
                        self.logprobs[row].append(found.of(step, row))
        return given

    def _given(self, sampled: list[int]) -> list[int | None]:
        """What an iteration gives, after a step that sampled so."""
        self._left -= 1
        given: list[int | None] = [None] * len(self.tokens)
        for row, token in enumerate(sampled):
            if not self._active[row]:
                continue
            if token < 0:
                self._end(row, "failed" if token == NO_DISTRIBUTION else "stop token")
                continue
            given[row] = token
            self.tokens[row].append(token)
            if self._left == 0:
                self._end(row, "length")
        return given

    def _end(self, row: int, reason: Reason) -> None:
        self._active[row] = False
        self.finish_reasons[row] = reason

    def _check(self) -> None:
        """Raise an error for the first of the rows that have failed."""
        if "failed" in self.finish_reasons:
            row = self.finish_reasons.index("failed")
            raise no_distribution(f"generate: row {row}", len(self.tokens[row]))


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: the new tokens of each row.
      finish_reasons: why each row has ended: "length" or "stop token".
      session: what another call needs to go on.
      logprobs: None, or a `LogProbs` for each of `tokens`, where the call asked for them.
    """

    tokens: list[list[int]]
    finish_reasons: list[Reason | None]
    session: Session
    logprobs: list[list[LogProbs]] | None = None


def generate(
    module: ModuleType | Invariant,
    params: Any,
    prompts: Sequence[Sequence[int] | np.ndarray],
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] | None = None,
    stop_tokens: Sequence[int] = (),
    session: Session | None = None,
    state: Any = None,
    prefill_chunks: Sequence[int] = PREFILL_CHUNKS,
    dtype: DTypeLike = jnp.float32,
    kernels: Kernels | str | None = None,
    logprobs: int | None = None,
) -> Generated:
    """The tokens that continue prompts, up to `max_new_tokens` of each row.

    A call with the session of another one and empty prompts gives, bit for bit, the tokens that the
    other one would have given next. With more than 32 rows of bfloat16 on a GPU, where updates of
    states are deferred, that is so but for rounding of the logits.

    The arguments and errors are those of `TokenStream`. A row that fails is an error after all rows
    have ended: a FloatingPointError.
    """
    stream = TokenStream(
        *(module, params, prompts, max_new_tokens),
        sampling=sampling,
        seed=seed,
        stop_tokens=stop_tokens,
        session=session,
        state=state,
        prefill_chunks=prefill_chunks,
        dtype=dtype,
        kernels=kernels,
        logprobs=logprobs,
    )
    stream.run()
    return Generated(stream.tokens, stream.finish_reasons, stream.session, stream.logprobs)
