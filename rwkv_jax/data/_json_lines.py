"""Lines of JSON, each a text or a conversation."""

import json
from typing import Any

from rwkv_jax.chat import G1, Template
from rwkv_jax.data._conversations import parts
from rwkv_jax.data._documents import BEGIN, Document, checksums, encoded
from rwkv_jax.data._ranges import Paths, Ranges, lines
from rwkv_jax.tokenizers import Tokenizer


class JsonLines:
    """A `Source` of the documents in files with a JSON object a line, which has either `text`, the
    text of the document, or `messages`, a conversation of `chat.Message`, and perhaps `tools`, the
    functions that it may call, as `form.with_tools` takes them.

    Of a conversation the answers of the assistant count, each with what ends it: the first words of
    the next question, as `form.stop` has them, or the end of the document. They begin where the
    prompt of `form.render` ends. Texts between these places become tokens one by one, so that no
    token is half in an answer. After the tokens of a document comes `end_of_text` of the tokenizer,
    if it has one.

    Args:
      paths: a file or several, in UTF-8. Empty lines are left out.
      tokenizer: what makes tokens of the text.
      form: the format of conversations; that of the G1 models, `chat.G1()`, if None.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a file is empty, or no regular one. Also where a document is read, with its file
        and line: the line is no JSON, or no such object; the text is empty; a message has an
        unknown role or no content; no answer is in the conversation; the template fails for it, or
        writes an answer in another way once messages follow it; or `tools` is no list, or one has
        no name.
    """

    def __init__(self, paths: Paths, tokenizer: Tokenizer, *, form: G1 | Template | None = None):
        self._form = G1() if form is None else form
        self._tokenizer = self._form.tokenizer(tokenizer)
        self._ranges = Ranges(paths, lines)

    def __len__(self) -> int:
        return len(self._ranges)

    def __getitem__(self, number: int, /) -> Document:
        number = range(len(self))[number]
        try:
            return self._document(json.loads(self._ranges.read(number)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self._ranges.place(number)}: {error}") from None

    def place(self, number: int) -> str:
        return self._ranges.place(range(len(self))[number])

    def checksums(self) -> list[int]:
        return checksums(self, lambda number: self._ranges.read(number, BEGIN))

    def _document(self, line: Any) -> Document:
        match line:
            case {"text": str(text)} if "messages" not in line:
                return encoded(self._tokenizer, [(text, True)])
            case {"messages": [*_] as messages} if "text" not in line:
                form = self._form
                match line.get("tools"):
                    case [*_] as tools if tools:
                        form = form.with_tools(tools)
                    case tools if tools:
                        raise ValueError(f"tools is {tools!r:.100}; accepted is a list")
                return encoded(self._tokenizer, parts(form, messages))
        raise ValueError(
            f"the line is {line!r:.100}; accepted is an object with either a text as `text` or a "
            "list as `messages`"
        )
