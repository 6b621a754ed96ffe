"""Text as it comes, up to a stop string."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from rwkv_jax import tokenizers
from rwkv_jax.generation._session import Session
from rwkv_jax.generation._streaming import Reason, TokenStream

TextReason: TypeAlias = Reason | Literal["stop string"]


class TextStream(Iterator[list[str]]):
    """The text of the tokens of a stream, up to a stop string.

    An iteration gives a list with the text of each row that has become certain: it holds back
    half characters, and text that a stop string may begin with. The text of a row ends before the
    first stop string in it, of several the one that is complete first. By then the row has read the
    tokens of the stop string.

    Args:
      stream: the tokens.
      tokenizer: as `tokenizers.load` gives it.
      stop: the stop strings.

    Attributes:
      tokens: the tokens of each row so far.
      texts: the text of each row so far.
      rests: what each row has read beyond its text: the stop string, and what else its last token
        has.
      reasons: why each row has ended, or None: "stop string", or as in `TokenStream`.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(
        self, stream: TokenStream, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = ()
    ):
        if isinstance(stop, str) or not all(stop):
            raise ValueError(
                f"TextStream: stop is {stop!r}; accepted is a sequence of texts that are not empty"
            )
        self._stream, self._stop = stream, tuple(stop)
        self._decoders = [tokenizers.Stream(tokenizer) for _ in stream.tokens]
        self.tokens = stream.tokens
        self.texts = [""] * len(stream.tokens)
        self.rests = [""] * len(stream.tokens)
        self.reasons: list[TextReason | None] = list(stream.reasons)

    @property
    def session(self) -> Session:
        """The session after the tokens so far, as in `TokenStream`."""
        return self._stream.session

    def __next__(self) -> list[str]:
        given = []
        for row, token in enumerate(next(self._stream)):
            text = self._next_text(row, token) if self.reasons[row] is None else ""
            self.texts[row] += text
            given.append(text)
        return given

    def stop(self, row: int) -> str:
        """End a row, and give the text that was held back."""
        self._stream.stop(row)
        text = self._next_text(row, None) if self.reasons[row] is None else ""
        self.texts[row] += text
        return text

    def _next_text(self, row: int, token: int | None) -> str:
        """The text that becomes certain with a token, or with the end of the row."""
        decoder, ended = self._decoders[row], self._stream.reasons[row]
        text = self.rests[row] + ("" if token is None else decoder.push(token))
        if ended is not None:
            text += decoder.finish()
        found = [(text.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        if ends:
            self._stream.stop(row)
            self.reasons[row] = "stop string"
            certain = min(ends)[1]
        else:
            self.reasons[row] = ended
            certain = len(text) if ended is not None else len(text) - self._held(text)
        self.rests[row] = text[certain:]
        return text[:certain]

    def _held(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        lengths = range(min(len(text), max(map(len, self._stop), default=0)), 0, -1)
        ends = (n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop))
        return next(ends, 0)
