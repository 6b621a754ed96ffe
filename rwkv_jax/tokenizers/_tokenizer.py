"""What all tokenizers have: a function that encodes text, and the bytes of each token."""

import codecs
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import SupportsIndex

END_OF_TEXT = ("<|endoftext|>", "<|rwkv_tokenizer_end_of_text|>")
"""The names that files have for the token after the end of a document."""


class Tokenizer:
    """Text to tokens, and tokens to text. Every token stands for some bytes, and the text of tokens
    is what their bytes are in UTF-8.

    Attributes:
      name: the name or the path that `load` took.
      vocab_size: the number of tokens, which are 0 to vocab_size - 1.
      end_of_text: the token after the end of a document, or None if there is none. No text has it.
    """

    def __init__(
        self,
        name: str,
        vocab_size: int,
        pieces: Mapping[int, bytes],
        encode: Callable[[str], list[int]],
        end_of_text: int | None = None,
    ):
        """A tokenizer.

        Args:
          name: its name.
          vocab_size: the number of tokens.
          pieces: the bytes of each token that has any.
          encode: the tokens of a text.
          end_of_text: the token after the end of a document.

        Raises:
          ValueError: `pieces` has a token that is not below `vocab_size`.
        """
        if pieces and not 0 <= min(pieces) <= max(pieces) < vocab_size:
            raise ValueError(
                f"{name}: the tokenizer has tokens from {min(pieces)} to {max(pieces)}; accepted "
                f"with a vocabulary of {vocab_size} are 0 to {vocab_size - 1}"
            )
        self.name, self.vocab_size, self.end_of_text = name, vocab_size, end_of_text
        self._pieces, self._encode = pieces, encode

    def encode(self, text: str) -> list[int]:
        """The tokens of a text.

        Raises:
          UnicodeEncodeError: the text has a surrogate without its other half. It is a ValueError.
          ValueError: the tokenizer of a `tokenizer.json` makes another text of this one.
        """
        text.encode()  # the surrogates, about which encoders disagree
        return self._encode(text)

    def decode_bytes(self, tokens: Iterable[SupportsIndex]) -> bytes:
        """The bytes of tokens. Tokens that stand for no text, such as `end_of_text`, have none.

        Raises:
          TypeError: a token is no integer.
          ValueError: a token is not below `vocab_size`, or is negative.
        """
        return b"".join(self._piece(operator.index(token)) for token in tokens)

    def decode(self, tokens: Iterable[SupportsIndex]) -> str:
        """The text of tokens. Bytes that are no UTF-8 become U+FFFD, as those of a character do of
        which some bytes are missing.

        Raises:
          TypeError, ValueError: as `decode_bytes` raises them.
        """
        return self.decode_bytes(tokens).decode(errors="replace")

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self.vocab_size:
            raise ValueError(
                f"{self.name}: a token is {token}; accepted are 0 to {self.vocab_size - 1}"
            )
        return self._pieces.get(token, b"")


class Marked(Tokenizer):
    """A tokenizer of texts that have marks in the places of `end_of_text`.

    Args:
      tokenizer: what makes tokens of the text between the marks. A mark is nothing if it has no
        `end_of_text`.
      mark: a text that no other text has.
    """

    def __init__(self, tokenizer: Tokenizer, mark: str):
        own = tokenizer._pieces, tokenizer.encode, tokenizer.end_of_text
        super().__init__(tokenizer.name, tokenizer.vocab_size, *own)
        self._mark = mark

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with `end_of_text` in the places of marks.

        Raises:
          ValueError: as `Tokenizer.encode` raises it.
        """
        end = [] if self.end_of_text is None else [self.end_of_text]
        first, *others = map(self._encode, text.split(self._mark))
        return [*first, *(token for part in others for token in (*end, *part))]


class Stream:
    """The text of tokens that come one after another. What `push` and `finish` return makes up what
    `Tokenizer.decode` gives for all tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: SupportsIndex) -> str:
        """The characters that a token completes, which may be none: the bytes of a character may be
        in several tokens.

        Raises:
          TypeError, ValueError: as `Tokenizer.decode_bytes` raises them.
        """
        return self._decoder.decode(self._tokenizer.decode_bytes([token]))

    def finish(self) -> str:
        """U+FFFD if the last character is not complete. The stream then begins anew."""
        return self._decoder.decode(b"", final=True)
