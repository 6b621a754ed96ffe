"""Text as it comes, up to a stop string."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from rwkv_jax import tokenizers
from rwkv_jax.generation._log_probs import LogProbs
from rwkv_jax.generation._session import Session
from rwkv_jax.generation._streaming import Reason, TokenStream

TextReason: TypeAlias = Reason | Literal["stop string"]


def check_stop(what: str, stop: Sequence[str]) -> tuple[str, ...]:
    """The stop strings. Raise an error that begins with `what` if they are one text, or if one of
    them is empty."""
    if isinstance(stop, str) or not all(stop):
        raise ValueError(
            f"{what}: stop is {stop!r}; accepted is a sequence of texts that are not empty"
        )
    return tuple(stop)


class RowText:
    """The text of the tokens of a row, up to a stop string, of several the one that is complete
    first. Tokens that the tokenizer does not have are tokens without text.

    Attributes:
      text: the text that has become certain.
      rest: what the row has read beyond it, such as half of a stop string.
      stopped: whether `rest` begins with a stop string.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, stop: tuple[str, ...]):
        self._decoder, self._stop = tokenizers.Stream(tokenizer), stop
        self._tokens = tokenizer.vocab_size
        self.text, self.rest, self.stopped = "", "", False

    def push(self, token: int | None, ended: bool) -> str:
        """The text that becomes certain with a token, or with the end of the row."""
        # A model may have more tokens than its tokenizer.
        text = self.rest
        if token is not None and token < self._tokens:
            text += self._decoder.push(token)
        if ended:
            text += self._decoder.finish()
        found = [(text.find(stop), stop) for stop in self._stop]
        ends = [(start + len(stop), start) for start, stop in found if start >= 0]
        self.stopped = bool(ends)
        held = 0 if ended else self._held(text)
        certain = min(ends)[1] if ends else len(text) - held
        self.text += text[:certain]
        self.rest = text[certain:]
        return text[:certain]

    def _held(self, text: str) -> int:
        """The length of the longest end of `text` that a stop string begins with."""
        lengths = range(min(len(text), max(map(len, self._stop), default=0)), 0, -1)
        ends = (n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop))
        return next(ends, 0)


class TextStream(Iterator[list[str]]):
    """The text of the tokens of a stream, up to a stop string.

    An iteration gives a list with the text of each row that has become certain: it holds back
    half characters, and text that a stop string may begin with. The text of a row ends before the
    first stop string in it, of several the one that is complete first. By then the row has read the
    tokens of the stop string.

    Args:
      stream: the tokens.
      tokenizer: as `tokenizers.load` gives it. Tokens of the model that it does not have are tokens
        without text.
      stop: the stop strings.

    Attributes:
      tokens: the tokens of each row so far.
      finish_reasons: why each row has ended, or None: "stop string", or as in `TokenStream`.

    Raises:
      ValueError: a stop string is empty.
    """

    def __init__(
        self, stream: TokenStream, tokenizer: tokenizers.Tokenizer, stop: Sequence[str] = ()
    ):
        stop = check_stop("TextStream", stop)
        self._stream = stream
        self._rows = [RowText(tokenizer, stop) for _ in stream.tokens]
        self.tokens = stream.tokens
        self.finish_reasons: list[TextReason | None] = list(stream.finish_reasons)

    @property
    def texts(self) -> list[str]:
        """The text of each row so far."""
        return [row.text for row in self._rows]

    @property
    def rests(self) -> list[str]:
        """What each row has read beyond its text: the stop string, and what else its last token
        has."""
        return [row.rest for row in self._rows]

    @property
    def logprobs(self) -> list[list[LogProbs]] | None:
        """The log probabilities of the tokens so far, as in `TokenStream`."""
        return self._stream.logprobs

    @property
    def session(self) -> Session:
        """The session after the tokens so far, as in `TokenStream`."""
        return self._stream.session

    def __next__(self) -> list[str]:
        return [
            self._pushed(row, token) if self.finish_reasons[row] is None else ""
            for row, token in enumerate(next(self._stream))
        ]

    def stop(self, row: int) -> str:
        """End a row, and give the text that was held back."""
        self._stream.stop(row)
        return self._pushed(row, None) if self.finish_reasons[row] is None else ""

    def _pushed(self, row: int, token: int | None) -> str:
        ended = self._stream.finish_reasons[row]
        text = self._rows[row].push(token, ended is not None)
        if self._rows[row].stopped:
            self._stream.stop(row)
            ended = "stop string"
        self.finish_reasons[row] = ended
        return text
