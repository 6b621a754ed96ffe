"""The formats of the RWKV-7 G1 models.

Source: `RWKV-v7/RWKV7-G1x-templates.txt` of RWKV-LM.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from rwkv_jax._operator import check
from rwkv_jax.chat._messages import Message, checked, in_json, parsed
from rwkv_jax.tokenizers import Tokenizer

Think: TypeAlias = Literal["off", "fast", "on", "short", "long"]

_THINK: Mapping[str, str] = {"off": "", "fast": "<think></think"}
"""How answers begin, without the last character of a tag, which the model writes; all others are
`<think`. The model was trained with tokens that join this character and what follows it."""
_LENGTH: Mapping[str, str] = {"short": " (think a bit)", "long": " (think a lot)"}
_LINE = "\n"
_BLANK = re.compile(r"\n\s*\n")


class G1:
    """The formats of the RWKV-7 G1 models, of which the World models know the first one:

        System: ...

        User: ...

        Assistant: ...

    with an empty line after each message, so that messages have none. With tools, or with messages
    about tools, the roles are headings of Markdown, and tools and their calls are JSON.

    A document ends with the token 0, `Tokenizer.end_of_text`.

    Args:
      tools: the functions that the model may call, each an object with `name`, `description` and
        `parameters` (a JSON schema), or such an object under `function`, as OpenAI has it.
      think: whether answers begin with thoughts: "off"; "fast", with empty ones; "on"; or "short"
        or "long", which asks for a length with each question.

    Attributes:
      tools: the functions that the model may call.
      stop: what ends an answer; the first one is what a question of the user begins with.
      opening: what `render` begins an answer with.

    Raises:
      ValueError: a tool has no name, or `think` is none of these.
    """

    def __init__(self, *, tools: Sequence[Mapping[str, Any]] = (), think: Think = "off"):
        check.choice("G1", "think", think, get_args(Think))
        self.tools = tuple(tools)
        self._mode: Think = think
        self._tools = [_tool(number, tool) for number, tool in enumerate(tools, 1)]
        self._length = _LENGTH.get(think, "")
        self._think = _THINK.get(think, "<think")
        with_tools = ("\n### User", "\n### Tool Output")
        self.stop: tuple[str, ...] = with_tools if self._tools else ("\n\nUser:",)
        self.opening = self._begin(_LINE if self._tools else " ")

    def question(self, text: str) -> str:
        """The content of a message of the user, with what `think` asks for."""
        return clean(text) + self._length

    def reply(self, text: str) -> str:
        """The content of a message of the assistant, from what the model wrote after `render`."""
        return self.opening + text

    def tokenizer(self, tokenizer: Tokenizer) -> Tokenizer:
        """The tokenizer of what `render` returns, which has no special tokens: `tokenizer`."""
        return tokenizer

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> "G1":
        """The same format with other tools.

        Raises:
          ValueError: a tool has no name.
        """
        return G1(tools=tools, think=self._mode)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of a conversation.

        An answer whose content begins with a space or a new line is taken as it is, as a model
        wrote it; others follow one.

        Args:
          messages: the messages. Empty lines in those of the system and of the user are left out.
          answer: whether an answer begins at the end.

        Raises:
          ValueError: a message is none, or of an unknown role.
        """
        found = list(checked(messages))
        if self._tools or any(role == "tool" or calls for role, _, calls in found):
            parts = self._with_headings(found)
            return _LINE.join(parts + ["### Assistant" + self._begin(_LINE)] * answer)
        parts = [
            f"Assistant:{_after(' ', content)}"
            if role == "assistant"
            else f"{role.capitalize()}: {clean(content)}"
            for role, content, _ in found
        ]
        return "\n\n".join(parts + ["Assistant:" + self._begin(" ")] * answer)

    def before_question(self, messages: Sequence[Message]) -> str:
        """The text of a conversation up to where the content of the next question begins, but for
        the space or the new line before it.

        Raises:
          ValueError: as `render` raises it.
        """
        if not messages and not self._tools:
            return self.stop[0].strip()
        return self.render(messages, answer=False) + self.stop[0]

    def _begin(self, space: str) -> str:
        return space + self._think if self._think else ""

    def _with_headings(self, messages: list[tuple[str, str, list[dict[str, Any]]]]) -> list[str]:
        system = "\n".join(clean(content) for role, content, _ in messages if role == "system")
        described = "\n\n".join(self._tools)
        parts = ["### System", *filter(None, (system, described))] if system or described else []
        for role, content, calls in messages:
            if role == "user":
                parts += ["### User", clean(content)]
            elif role == "tool":
                parts += ["### Tool Output", _block(parsed(content))]
            elif role == "assistant":
                written = f"### Assistant{_after(_LINE, content)}"
                parts += [written, *(f"**Tool Call:**\n{_block(call)}" for call in calls)]
        return parts


def clean(text: str) -> str:
    """The text without empty lines, which end messages, and without space around it."""
    return _BLANK.sub("\n", text.replace("\r\n", "\n")).strip()


def _after(space: str, content: str) -> str:
    return content if not content or content[0].isspace() else space + content


def _block(value: Any) -> str:
    return f"```json\n{in_json(value)}\n```"


def _tool(number: int, tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"G1: tool {number} is {tool!r:.100}; accepted is an object with the name, the "
            "description and the parameters of a function"
        )
    described = function.get("description")
    return "\n".join(
        [
            f"### `{function['name']}`",
            *([f"**Description:** {described}"] if described else []),
            f"**Parameters:**\n{_block(function.get('parameters', {}))}",
        ]
    )
