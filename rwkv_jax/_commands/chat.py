"""`rwkv-jax chat`: a conversation with a model, in the format of the RWKV World and G1 models or as
a template says."""

import argparse
import contextlib
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, get_args

from rwkv_jax import _files
from rwkv_jax._commands.arguments import (
    add_adapter,
    add_dtype,
    add_initial_state,
    add_model,
    add_tokenizer,
)
from rwkv_jax._commands.interrupt import Interrupt
from rwkv_jax._commands.output import SESSIONS, check_target
from rwkv_jax._commands.sampling import add_sampling, seed_of
from rwkv_jax._commands.text_model import TextModel
from rwkv_jax.chat import G1, Message, Template, template_in
from rwkv_jax.chat._g1 import Think
from rwkv_jax.chat._tools import read_tools

if TYPE_CHECKING:
    from rwkv_jax.generation import Session, TextStream

Form: TypeAlias = G1 | Template

HELP = "Talk with a model. Ctrl-C ends an answer, and /help lists what else can be typed."
EXAMPLES = (
    "chat model.pth",
    "chat model.pth --session conversation.safetensors --top-p 0.3 --dtype bfloat16",
    "chat folder-of-hugging-face --system 'Answer briefly.' --think fast",
)

_USER, _ASSISTANT = "User:", "Assistant:"
_HELP = """\
/save FILE  write the conversation to a .safetensors file
/load FILE  go on with the conversation in a file
/reset      begin anew
/retry      answer the last message again
/tool TEXT  the result of a tool that the model has called
/speed      how fast the model reads and writes
/quit       end, as Ctrl-D does
A message goes on in the next line after a line that ends with a backslash.
Empty lines within it are left out, because in this format they end a message."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "--session",
        metavar="FILE",
        help="a .safetensors file of the conversation: read at the start, if it is there, and "
        "written at the end",
    )
    add_adapter(parser)
    add_initial_state(parser)
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told first")
    parser.add_argument(
        "--think",
        choices=get_args(Think),
        default="off",
        help="whether answers begin with thoughts, as the G1 models write them: with empty ones "
        "(fast), or with shorter or longer ones (default: off)",
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        help="a JSON list of functions that the model may call, each with a name, a description "
        "and parameters",
    )
    parser.add_argument(
        "--template",
        metavar="FILE",
        help="a Jinja template of conversations (default: that in the folder of the adapter or of "
        "MODEL); none for the format of the World and G1 models",
    )
    add_tokenizer(parser)
    add_dtype(parser, "dtype of weights and activations (default: float32)", "float32")
    add_sampling(parser, 1000)


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # editing of lines
    if arguments.session is not None:
        check_target("--session", arguments.session, SESSIONS)
    form = _form(arguments)
    if arguments.session is not None and isinstance(form, Template):
        raise ValueError("--session with a template; accepted is --template none")
    model, seed = TextModel(arguments), seed_of(arguments)
    model.tokenizer = form.tokenizer(model.tokenizer)
    conversation = Conversation(model, form, arguments.system, arguments.tokens, seed)
    if arguments.session is not None and _files.expanded(arguments.session).exists():
        conversation.load(arguments.session)
    while (message := _message()) is not None:
        command, _, rest = message.partition(" ")
        if command == "/quit":
            break
        try:
            if message.startswith("/"):
                print(conversation.command(command, rest.strip()))
            elif message.strip():
                conversation.say(message)
        except (OSError, ValueError, FloatingPointError) as error:
            print(error)
    if arguments.session is not None:
        conversation.save(arguments.session)
    return 0


def _form(arguments: argparse.Namespace) -> Form:
    """How messages become text.

    Raises:
      OSError, ImportError, ValueError: a file cannot be read or has no template or tools.
    """
    tools = [] if arguments.tools is None else read_tools(arguments.tools)
    path = arguments.template
    if path is None and arguments.adapter is not None:
        path = template_in(arguments.adapter)
    if path is None:
        path = template_in(arguments.model)
    if path is None or path == "none":
        return G1(tools=tools, think=arguments.think)
    return Template(path, tools=tools, think=arguments.think not in ("off", "fast"))


def _message() -> str | None:
    """What the user types, or None at the end of the input."""
    lines: list[str] = []
    while not lines or lines[-1].endswith("\\"):
        try:
            lines.append(input(f"{_USER} " if not lines else "... "))
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the conversation)")
            lines = []
        except EOFError:
            print()
            return None
    return "\n".join([*(line[:-1] for line in lines[:-1]), lines[-1]])


class Turn(NamedTuple):
    """What the model has read, and its session then. What it has read before the conversation,
    which the file of a session does not say, is not in the text."""

    text: str = ""
    session: "Session | None" = None


class Conversation:
    """What was said, as messages and as the session of a model that has read them.

    Args:
      model: the model.
      form: how messages become text.
      system: what the model is told first; nothing if empty.
      length: the largest number of tokens of an answer.
      seed: the seed.
    """

    def __init__(self, model: TextModel, form: Form, system: str, length: int, seed: int):
        self._model, self._form, self._length, self._seed = model, form, length, seed
        self._system = [{"role": "system", "content": system}] if system else []
        self._begin(Turn())

    def _begin(self, start: Turn) -> None:
        """Begin anew, or where a session is, which is where a question begins."""
        self._start = self._before = self._now = start
        self._messages: list[Message] = [*self._system]

    def answer(self, message: Message) -> None:
        """Print the answer to a message. An answer that the user interrupts is kept as far as it
        was written.

        Raises:
          ValueError: the conversation has too many tokens, or the template refuses it.
          FloatingPointError: a logit is NaN or infinite. The conversation is as it was before.
        """
        messages = [*self._messages, message]
        text = self._rest(self._form.render(messages))
        before = self._latest(text)
        print(f"{_ASSISTANT} {self._form.opening.strip()}".rstrip(), end="", flush=True)
        try:
            with Interrupt() as interrupt:
                stream = self._read(before, text, self._length)
                for (part,) in self._model.write(stream, interrupt):
                    print(part, end="", flush=True)
        finally:
            print("\n")
        seen = stream.texts[0] + stream.rests[0]
        content = self._form.reply(_answer(seen, self._form.stop))
        self._messages = [*messages, {"role": "assistant", "content": content}]
        self._before, self._now = before, Turn(text + seen, stream.session)

    def _rest(self, text: str) -> str:
        """A conversation without what the model has read before it."""
        if self._start.session is None:
            return text
        return text.removeprefix(self._before_question(self._system))

    def _latest(self, text: str) -> Turn:
        """The turn after which the model has the least to read of a text."""
        turns = (self._now, self._before, self._start)
        return next(turn for turn in turns if text.startswith(turn.text))

    def _read(self, turn: Turn, text: str, length: int) -> "TextStream":
        unread = text.removeprefix(turn.text)
        return self._model.read(
            *([unread], length), session=turn.session, seed=self._seed, stop=self._form.stop
        )

    def _before_question(self, messages: Sequence[Message]) -> str:
        if isinstance(self._form, Template):
            raise ValueError(
                "a template does not say where a question begins, so that there are no files of "
                "its conversations; accepted is --template none"
            )
        return self._form.before_question(messages)

    def save(self, path: str) -> None:
        """Write the conversation, up to where a message begins."""
        from rwkv_jax import generation

        text = self._rest(self._before_question(self._messages))
        turn = self._latest(text)
        if text != turn.text:
            turn = Turn(text, self._read(turn, text, 0).session)
            self._now = turn
        assert turn.session is not None
        generation.save(path, turn.session)

    def load(self, path: str) -> None:
        """Go on with the conversation in a file."""
        self._before_question([])
        session = self._model.load(path)
        if len(session.positions) != 1:
            raise ValueError(f"{path}: the file has {len(session.positions)} rows; accepted is 1")
        self._begin(Turn("", session))

    def command(self, name: str, argument: str) -> str:
        """Carry out what a line with a slash says, and return what to print.

        Raises:
          OSError, ValueError: a file cannot be written or read.
          ValueError, FloatingPointError: as `answer` raises them.
        """
        if name in ("/save", "/load", "/tool") and not argument:
            return f"{name} needs {'a result' if name == '/tool' else 'the name of a file'}"
        if name == "/save":
            check_target("/save", argument, SESSIONS)
            self.save(argument)
            return f"saved to {argument}"
        if name == "/load":
            self.load(argument)
            return f"loaded from {argument}"
        if name == "/tool":
            if isinstance(self._form, G1) and not self._form.tools:
                return "/tool needs --tools"
            self.answer({"role": "tool", "content": argument})
            return ""
        if name == "/reset":
            self._begin(Turn())
            return "a new conversation"
        if name == "/retry":
            return self._retry()
        if name == "/speed":
            return str(self._model.speed)
        return _HELP if name == "/help" else f"{name} is unknown; /help lists what is known"

    def _retry(self) -> str:
        answered = self._messages
        if len(answered) < 2 or answered[-1]["role"] != "assistant":
            return "there is no message to answer"
        # The same seed would give the same answer.
        self._seed = (self._seed + 1) % 2**31
        self._messages = answered[:-2]
        try:
            self.answer(answered[-2])
        except (ValueError, FloatingPointError):
            self._messages = answered
            raise
        return ""

    def say(self, text: str) -> None:
        """Print the answer to what the user types."""
        self.answer({"role": "user", "content": self._form.question(text)})


def _answer(seen: str, stop: Sequence[str]) -> str:
    """What the model wrote, without a stop string and what follows it, or the beginning of one."""
    if ends := [seen.index(x) for x in stop if x in seen]:
        return seen[: min(ends)]
    lengths = (n for x in stop for n in range(len(x), 0, -1) if seen.endswith(x[:n]))
    return seen[: len(seen) - max(lengths, default=0)]
