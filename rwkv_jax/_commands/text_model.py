"""The model of a command that writes text."""

import argparse
import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rwkv_jax._commands.arguments import tokenizer_of, with_adapter
from rwkv_jax._commands.interrupt import Interrupt
from rwkv_jax._commands.sampling import sampling_of

if TYPE_CHECKING:
    from rwkv_jax.generation import Session, TextStream, TokenStream


@dataclasses.dataclass
class Speed:
    """How many tokens a model has read and written, and how long that took, in seconds."""

    read: int = 0
    reading: float = 0.0
    written: int = 0
    writing: float = 0.0
    compiling: float = 0.0

    def __str__(self) -> str:
        def speed(tokens: int, seconds: float) -> str:
            each = f" ({tokens / seconds:.1f} tokens/s)" if tokens else ""
            return f"{tokens} tokens in {seconds:.2f} s{each}"

        return (
            f"read {speed(self.read, self.reading)}, wrote {speed(self.written, self.writing)}, "
            f"after {self.compiling:.1f} s of compiling"
        )


class TextModel:
    """The model, the tokenizer and the settings of a command line. `speed` is that of all that the
    model has read and written, without the time to compile programs.

    Raises:
      OSError, ValueError, ImportError: the model or the tokenizer cannot be loaded, or a setting is
        not accepted.
    """

    def __init__(self, arguments: argparse.Namespace):
        from rwkv_jax import models

        self.tokenizer = tokenizer_of(arguments, models.inspect(arguments.model).config.vocab_size)
        self._sampling = sampling_of(arguments, self.tokenizer)
        checkpoint = models.load(arguments.model, dtype=arguments.dtype)
        self._module, self._params = (
            checkpoint.module,
            models.for_decoding(with_adapter(arguments, checkpoint.params)),
        )
        self._dtype = arguments.dtype
        self._start = None
        if arguments.initial_state is not None:
            path, dtype = arguments.initial_state, self._dtype
            self._start = models.load_state(path, self._params, dtype=dtype)
        self._compiled: set[tuple[int, int]] = set()
        self.speed = Speed()

    def load(self, path: str | os.PathLike[str]) -> "Session":
        """The session in a file."""
        from rwkv_jax import generation

        return generation.load(path, self._module, self._params, dtype=self._dtype)

    def read(
        self,
        prompts: Sequence[str],
        length: int,
        *,
        session: "Session | None" = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
    ) -> "TextStream":
        """The text, of up to `length` tokens, after a prompt of each row. It also ends where the
        tokenizer has a token for the end of a text."""
        import jax

        from rwkv_jax.generation import TextStream

        tokens = [self.tokenizer.encode(prompt) for prompt in prompts]
        self._compile(len(tokens), max(map(len, tokens)))
        begin = time.perf_counter()
        stream = self._stream(tokens, length, session=session, seed=seed)
        jax.block_until_ready(stream.session)
        self.speed.reading += time.perf_counter() - begin
        self.speed.read += sum(map(len, tokens))
        return TextStream(stream, self.tokenizer, stop)

    def write(self, stream: "TextStream", interrupt: Interrupt) -> Iterator[list[str]]:
        """The pieces of text of a stream as they come, until all rows end or the user interrupts
        them."""
        while not interrupt.requested:
            begin, before = time.perf_counter(), sum(map(len, stream.tokens))
            texts = next(stream, None)
            if texts is None:
                return
            self.speed.writing += time.perf_counter() - begin
            self.speed.written += sum(map(len, stream.tokens)) - before
            yield texts
        yield [stream.stop(row) for row in range(len(stream.texts))]

    def _stream(
        self,
        tokens: Sequence[Sequence[int]],
        length: int,
        *,
        session: "Session | None" = None,
        **options: Any,
    ) -> "TokenStream":
        from rwkv_jax.generation import TokenStream

        end = self.tokenizer.end_of_text
        return TokenStream(
            *(self._module, self._params, tokens, length),
            sampling=self._sampling,
            stop_tokens=() if end is None else (end,),
            dtype=self._dtype,
            session=session,
            state=self._start if session is None else None,
            **options,
        )

    def _compile(self, batch: int, length: int) -> None:
        """Run each program once that reading and writing need."""
        import jax

        from rwkv_jax.generation._prefill import PREFILL_CHUNKS, lengths_of_prefill_chunks

        chunks = lengths_of_prefill_chunks(length, PREFILL_CHUNKS) or PREFILL_CHUNKS[:1]
        needed = {(batch, chunk) for chunk in chunks} - self._compiled
        begin = time.perf_counter()
        for _, chunk in sorted(needed):
            stream = self._stream([[0]] * batch, 1, prefill_chunks=(chunk,))
            next(stream)
            jax.block_until_ready(stream.session)
        self._compiled |= needed
        self.speed.compiling += time.perf_counter() - begin
