"""What a message has to be."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
"""`role` is "system", "user", "assistant" or "tool", and `content` a text. One of the assistant may
have `tool_calls` in the form of OpenAI: each has a `function` with a `name` and `arguments`, which
are an object or its JSON."""

ROLES = ("system", "user", "assistant", "tool")


def checked(messages: Sequence[Message]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """The role, the content and the tool calls of each message. `content` may be missing where
    there are tool calls.

    Raises:
      ValueError: a message is none, and it says which one.
    """
    for number, message in enumerate(messages, 1):
        what = f"chat: message {number}"
        if not isinstance(message, Mapping):
            raise ValueError(f"{what} is a {type(message).__name__}; accepted is a dictionary")
        role, content = message.get("role"), message.get("content")
        calls = message.get("tool_calls") or []
        if role not in ROLES:
            accepted = ", ".join(map(repr, ROLES))
            raise ValueError(f"{what} has the role {role!r:.100}; accepted are {accepted}")
        if content is None and calls:
            content = ""
        if not isinstance(content, str):
            raise ValueError(f"{what} has the content {content!r:.100}; accepted is a text")
        if not isinstance(calls, list | tuple) or (calls and role != "assistant"):
            raise ValueError(f"{what} has tool_calls; accepted is a list of them, of the assistant")
        yield role, content, [_call(what, call) for call in calls]


def _call(what: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"{what} has the tool call {call!r:.100}; accepted is one with the name and the "
            "arguments of a function"
        )
    return {"name": function["name"], "arguments": parsed(function.get("arguments", {}))}


def parsed(value: Any) -> Any:
    """What a JSON text says; the value itself if it is none."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def in_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
