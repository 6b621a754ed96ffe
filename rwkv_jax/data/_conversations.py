"""Which parts of a conversation are answers."""

from collections.abc import Iterator, Sequence

from rwkv_jax.chat import G1, Message, Template


def parts(form: G1 | Template, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
    """The text of a conversation in parts, each with whether it is an answer of the assistant and
    what ends it.

    Raises:
      ValueError: `form.render` raises it, there is no answer, or an answer is not in the text as it
        would be in that of the messages up to it.
    """
    text, end = form.render(messages, answer=False), 0
    about_tools = any(x["role"] == "tool" or x.get("tool_calls") for x in messages)
    if about_tools and isinstance(form, G1) and not form.tools:
        raise ValueError(
            "the conversation has tool calls; accepted is a line with `tools`, or a form that has "
            "them, such as chat.G1(tools=[...]), which --tools FILE of rwkv-jax train makes"
        )
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, stop = _answer(form, messages, number, text)
        yield text[end:start], False
        yield text[start:stop], True
        end = stop
    if end == 0:
        raise ValueError("the conversation has no answer of the assistant")
    if end < len(text):
        yield text[end:], False


def _answer(
    form: G1 | Template, messages: Sequence[Message], number: int, text: str
) -> tuple[int, int]:
    """Where an answer and what ends it begin and end in the text of all messages."""
    prompt = form.render(messages[:number])
    if not text.startswith(prompt):
        # The answer does not begin as the format would have the next one begin. A space before it
        # belongs to its first word.
        prompt = prompt.removesuffix(form.opening).rstrip(" ")
    through = form.render(messages[: number + 1], answer=False)
    if not text.startswith(through) or not through.startswith(prompt):
        raise ValueError(
            f"message {number + 1} is written in another way once messages follow it; accepted is "
            "a format that only adds text, or a line for each answer"
        )
    end = len(through)
    for stop in form.stop:
        # Of what ends the answer a template may have written a part already.
        at = text.rfind(stop, len(prompt), len(through) + len(stop))
        end = max(end, at + len(stop)) if at >= 0 else end
    return len(prompt), end
