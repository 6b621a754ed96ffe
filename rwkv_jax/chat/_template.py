"""The format that a Jinja template says, as Hugging Face has it in the folders of models."""

import copy
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rwkv_jax import _files
from rwkv_jax.chat._messages import Message, checked, parsed
from rwkv_jax.tokenizers import Tokenizer
from rwkv_jax.tokenizers._tokenizer import END_OF_TEXT, Marked

FILE = "chat_template.jinja"

_CONFIG = "tokenizer_config.json"
_LARGEST_FILE = 2**23
_ANSWER, _QUESTION = "[an answer]", "[a question]"
"""Contents by which it is found what a template has between them."""
_THOUGHTS = "<think"
_FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class Template:
    """A Jinja template of a conversation, which runs in a sandbox: it can read what it is given and
    nothing else. Neither its time nor its memory is bounded.

    Args:
      path: the file, of at most 8 MiB, or the folder of a model, as `template_in` takes it.
      tools: the functions that the model may call, as the template wants them.
      think: whether the model is to think before it answers. The template gets `enable_thinking`,
        as those of many models expect, and `rwkv_generation_prompt`.

    Where a template has the token for the end of a text, as `bos_token`, `eos_token` or its name,
    `render` puts a mark, of which the tokenizer of `tokenizer` makes this token. No message can
    have the mark, and in messages the names are text.

    Attributes:
      stop: what ends an answer, but for this token: what the template has between one and the next
        question.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: the package jinja2 is not installed.
      TypeError: `think` is not a boolean.
      ValueError: the file has no template, or one that fails for a conversation.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        think: bool = False,
    ):
        if not isinstance(think, bool):
            raise TypeError(f"Template: think is {think!r}; accepted are True and False")
        self._path = _files.expanded(path)
        # Half a surrogate is no text, so that other tokenizers refuse it.
        self._end = f"\udbff{secrets.token_hex(16)}"
        source = source_of(self._path)
        for name in END_OF_TEXT:
            source = source.replace(name, self._end)
        self._template = _compiled(self._path, source)
        self._options = {
            "tools": list(tools) or None,
            "enable_thinking": think,
            "rwkv_generation_prompt": "open_think" if think else "fake_think",
            "bos_token": self._end,
            "eos_token": self._end,
        }
        question = {"role": "user", "content": _QUESTION}
        several = [question, {"role": "assistant", "content": _ANSWER}, question]
        _, _, after = self.render(several, answer=False).partition(_ANSWER)
        between = after.partition(_QUESTION)[0].partition(self._end)[0].rstrip()
        self.stop: tuple[str, ...] = (between,) if between else ()
        begun = self.render([question]).removeprefix(self.render([question], answer=False))
        at = begun.find(_THOUGHTS)
        self.opening = begun[at:] if at >= 0 else ""

    def question(self, text: str) -> str:
        """The content of a message of the user."""
        return text.strip()

    def reply(self, text: str) -> str:
        """The content of a message of the assistant, from what the model wrote after `render`."""
        return (self.opening + text).strip()

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer of what `render` returns, from that of other text."""
        return Marked(tokenizer, self._end)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "Template":
        """The same template with other tools."""
        other = copy.copy(self)
        other._options = self._options | {"tools": list(tools) or None}
        return other

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of a conversation.

        Args:
          messages: the messages.
          answer: whether an answer begins at the end.

        Raises:
          ValueError: a message is none or of an unknown role, or the template fails or refuses the
            conversation.
        """
        import jinja2

        roles = [role for role, _, _ in checked(messages)]
        given = [
            # The tokenizer of the RWKV models gives their template the parsed result of a tool.
            {**x, "rwkv_json_content": parsed(x["content"])} if role == "tool" else dict(x)
            for role, x in zip(roles, messages, strict=True)
        ]
        try:
            return self._template.render(
                messages=given, add_generation_prompt=answer, **self._options
            )
        # A template computes, so that it can raise whatever its operations do.
        except (jinja2.TemplateError, *_FAILURES) as error:
            raise ValueError(f"{self._path}: the template fails: {error}") from None


def template_in(folder: str | os.PathLike[str]) -> Path | None:
    """The file with the template of a model: `chat_template.jinja` in its folder, or a
    `tokenizer_config.json` with one. None if there is none.

    Raises:
      ValueError: the `tokenizer_config.json` is no regular file or larger than 8 MiB.
    """
    folder = _files.expanded(folder)
    if (folder / FILE).is_file():
        return folder / FILE
    config = folder / _CONFIG
    return config if config.is_file() and _in_config(config) is not None else None


def source_of(path: Path) -> str:
    """The template in a file or a folder."""
    if path.is_dir():
        found = template_in(path)
        if found is None:
            raise FileNotFoundError(f"{path}: the folder has no {FILE}")
        path = found
    if path.name == _CONFIG:
        source = _in_config(path)
        if source is None:
            raise ValueError(f"{path}: the file has no chat_template")
        return source
    try:
        return _files.content(path, _LARGEST_FILE).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: the file is no text in UTF-8: {error}") from None


def _in_config(path: Path) -> str | None:
    """The template in a configuration of a tokenizer."""
    try:
        found = json.loads(_files.content(path, _LARGEST_FILE)).get("chat_template")
    except (AttributeError, UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _compiled(path: Path, source: str) -> Any:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError(
            f"{path} needs the package jinja2: pip install 'rwkv-jax[text]'"
        ) from error

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=False)

    # As transformers has it, since templates are written for that.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ValueError(f"{path}: the file is no Jinja template: {error}") from None
