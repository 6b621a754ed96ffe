"""`rwkv_jax.chat`: conversations as the text of a format or of a template."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rwkv_jax import chat
from rwkv_jax.chat import G1, Template

USER = {"role": "user", "content": " one\r\n\r\n\r\ntwo\n"}
TALK = [USER, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
SYSTEM = {"role": "system", "content": "Be\n \nbrief."}
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = {"function": {"name": "weather", "arguments": '{"city": "北京"}'}}


@pytest.mark.parametrize(
    ("think", "answer"),
    [
        ("off", "Assistant:"),
        ("fast", "Assistant: <think></think"),
        ("on", "Assistant: <think"),
        ("short", "Assistant: <think"),
        ("long", "Assistant: <think"),
    ],
)
@pytest.mark.quick
def test_format_of_g1(think: Any, answer: str) -> None:
    """As in the list of trained templates."""
    form = G1(think=think)
    assert form.render([USER]) == f"User: one\ntwo\n\n{answer}"
    assert form.render([USER], answer=False) == "User: one\ntwo"
    said = "User: one\ntwo\n\nAssistant: fine\n\nUser: more"
    assert form.render(TALK) == f"{said}\n\n{answer}"
    assert form.render([SYSTEM, *TALK]) == f"System: Be\nbrief.\n\n{said}\n\n{answer}"
    asked = {"short": "one\ntwo (think a bit)", "long": "one\ntwo (think a lot)"}
    assert form.question(USER["content"]) == asked.get(think, "one\ntwo")
    assert f"Assistant:{form.opening}" == answer
    assert form.stop == ("\n\nUser:",)
    raw = {"role": "assistant", "content": form.reply(" >\nfine ")}
    assert form.render([USER, raw], answer=False).endswith(f"{answer} >\nfine ")


def test_before_a_question() -> None:
    assert G1().before_question([]) == "User:"
    assert G1().before_question([SYSTEM]) == "System: Be\nbrief.\n\nUser:"
    assert G1().before_question(TALK[:2]) == "User: one\ntwo\n\nAssistant: fine\n\nUser:"


def test_tools_of_g1() -> None:
    """As in the list of trained templates: tools, calls and results as JSON under headings."""
    talk = [
        SYSTEM,
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": '{"sun": true}'},
    ]
    described = """\
### System
Be
brief.
### `weather`
**Description:** Tells the weather.
**Parameters:**
```json
{
  "type": "object",
  "properties": {
    "city": {
      "type": "string"
    }
  }
}
```

### `other`
**Parameters:**
```json
{}
```
"""
    said = """\
### User
How is it?
### Assistant
**Tool Call:**
```json
{
  "name": "weather",
  "arguments": {
    "city": "北京"
  }
}
```
### Tool Output
```json
{
  "sun": true
}
```
### Assistant
<think"""
    form = G1(tools=[TOOL, {"type": "function", "function": {"name": "other"}}], think="on")
    assert form.render(talk) == described + said
    assert form.stop == ("\n### User", "\n### Tool Output")
    assert form.before_question([SYSTEM]) == described + "### User"
    # Without the tools, which messages may be about.
    assert G1(think="on").render(talk[1:]) == said


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, "text"], "message 2 is a str; accepted is a dictionary"),
        ([{"role": "bot", "content": ""}], "message 1 has the role 'bot'; accepted are 'system', "),
        ([{"content": "x"}], "has the role None"),
        ([{"role": "user"}], "message 1 has the content None; accepted is a text"),
        ([{"role": "user", "content": [1]}], r"has the content \[1\]"),
        ([USER | {"tool_calls": [CALL]}], "accepted is a list of them, of the assistant"),
        ([TALK[1] | {"tool_calls": [{"id": 3}]}], "has the tool call .*; accepted is one with"),
    ],
)
@pytest.mark.quick
def test_messages_that_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^chat: .*{message}"):
        G1().render(messages)


@pytest.mark.usefixtures("unchecked_types")
def test_options_that_are_refused() -> None:
    with pytest.raises(ValueError, match="G1: think is 'much'; accepted are 'off', 'fast', 'on'"):
        G1(think="much")  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"G1: tool 2 is \{\}; accepted is an object with the name"
    ):
        G1(tools=[TOOL, {}])


JINJA = """\
{%- for message in messages -%}
    {%- if message.role == 'tool' -%}
        {{- 'Tool: ' + message.rwkv_json_content | tojson(indent=1) + '\\n\\n' -}}
        {%- continue -%}
    {%- elif message.role == 'system' -%}
        {{- raise_exception('no system here') -}}
    {%- endif -%}
    {{- message.role | capitalize + ': ' + message.content + '\\n\\n' -}}
{%- endfor -%}
{%- for tool in tools or [] -%}{{- tool | tojson -}}{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- 'Assistant: ' -}}
    {{- '<think></think' if rwkv_generation_prompt == 'fake_think' else '<think' -}}
{%- endif -%}
"""


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "other.txt"])
@pytest.mark.quick
def test_template(tmp_path: Path, place: str) -> None:
    pytest.importorskip("jinja2")
    path = tmp_path / place
    path.write_text(json.dumps({"chat_template": JINJA}) if "json" in place else JINJA)
    if place != "other.txt":
        assert chat.template_in(tmp_path) == path
        path = tmp_path
    form = Template(path)
    assert (form.stop, form.opening) == (("\n\nUser:",), "<think></think")
    assert form.question(" x\n\ny ") == "x\n\ny"
    assert form.reply(">\nfine ") == "<think></think>\nfine"
    said = 'User: a\n\nTool: {\n "x": "世"\n}\n\n'
    talk = [{"role": "user", "content": "a"}, {"role": "tool", "content": '{"x": "世"}'}]
    assert form.render(talk, answer=False) == said
    assert Template(path, think=True).render(talk) == said + "Assistant: <think"
    for other in (Template(path, tools=[TOOL]), form.with_tools([TOOL])):
        assert other.render([], answer=False) == json.dumps(TOOL)
    with pytest.raises(ValueError, match=r"the template fails: no system here$"):
        form.render([SYSTEM])
    with pytest.raises(ValueError, match="has the role 'bot'"):
        form.render([{"role": "bot", "content": ""}])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "the file is no Jinja template: "),
        ("{{ messages.__class__.__mro__ }}", "the template fails: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "the template fails: access to attribute 'append'"),
        ("{% include '/etc/passwd' %}", "the template fails: no loader"),
        ("{{ 1 / 0 }}", "the template fails: division by zero"),
        ("{{ messages[0].content.x.y }}", "the template fails: .*has no attribute"),
        ("{{ range(10**9) | length }}", "the template fails: Range too big"),
    ],
)
@pytest.mark.quick
def test_templates_that_are_refused(tmp_path: Path, source: str, message: str) -> None:
    """One that asks for more than it is given, or fails."""
    pytest.importorskip("jinja2")
    path = tmp_path / "chat_template.jinja"
    path.write_text(source)
    with pytest.raises(ValueError, match=message) as error:
        Template(path)
    assert str(error.value).startswith(f"{path}: ")


def test_no_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content in ("{}", "[]", "{", '{"chat_template": [1]}'):
        (tmp_path / "tokenizer_config.json").write_text(content)
        assert chat.template_in(tmp_path) is None
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: the file has no chat_template"):
        Template(tmp_path / "tokenizer_config.json")
    with pytest.raises(FileNotFoundError, match="the folder has no chat_template"):
        Template(tmp_path)
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="no text in UTF-8"):
        Template(path)
    path.write_text("x")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r"needs the package jinja2: pip install 'rwkv-jax\[text"):
        Template(path)
