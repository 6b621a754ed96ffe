"""`rwkv-jax chat`: a conversation with a model, in the format of the RWKV World models."""

import argparse
import contextlib
import importlib
import re
from typing import TYPE_CHECKING, NamedTuple

from rwkv_jax import _files
from rwkv_jax._commands.arguments import add_dtype, add_initial_state, add_model, add_tokenizer
from rwkv_jax._commands.interrupt import Interrupt
from rwkv_jax._commands.output import SESSIONS, check_target
from rwkv_jax._commands.sampling import add_sampling, seed_of
from rwkv_jax._commands.text_model import TextModel

if TYPE_CHECKING:
    from rwkv_jax.generation import Session

HELP = "Talk with a model. Ctrl-C ends an answer, and /help lists what else can be typed."
EXAMPLES = (
    "chat model.pth",
    "chat model.pth --session conversation.safetensors --top-p 0.3 --dtype bfloat16",
)

_USER, _ASSISTANT = "User:", "Assistant:"
_AFTER_ANSWER = f"\n\n{_USER}"
_HELP = """\
/save FILE  write the conversation to a .safetensors file
/load FILE  go on with the conversation in a file
/reset      begin anew
/retry      answer the last message again
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
    add_initial_state(parser)
    add_tokenizer(parser)
    add_dtype(parser, "dtype of weights and activations (default: float32)", "float32")
    add_sampling(parser, 1000)


def run(arguments: argparse.Namespace) -> int:
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # editing of lines
    if arguments.session is not None:
        check_target("--session", arguments.session, SESSIONS)
    conversation = Conversation(TextModel(arguments), arguments.tokens, seed_of(arguments))
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
                conversation.answer(message)
        except (OSError, ValueError, FloatingPointError) as error:
            print(error)
    if arguments.session is not None:
        conversation.save(arguments.session)
    return 0


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
    """Where a conversation is between an answer and the next message: the session, the beginning of
    the next turn that the model has not read, and the last message."""

    session: "Session | None" = None
    unread: str = _USER
    message: str | None = None


class Conversation:
    """What was said, as the session of a model.

    Args:
      model: the model.
      length: the largest number of tokens of an answer.
      seed: the seed.
    """

    def __init__(self, model: TextModel, length: int, seed: int):
        self._model, self._length, self._seed = model, length, seed
        self._now = self._before = Turn()

    def answer(self, message: str, before: Turn | None = None) -> None:
        """Print the answer to a message after the turn `before`, which is the last one if None. An
        answer that the user interrupts is kept as far as it was written.

        Raises:
          ValueError: the conversation has too many tokens.
          FloatingPointError: a logit is NaN or infinite. The conversation is as it was before.
        """
        message = re.sub(r"\n\s*\n", "\n", message.strip())
        before = before or self._now
        session, unread, _ = before
        prompt = f"{unread} {message}\n\n{_ASSISTANT}"
        print(_ASSISTANT, end="", flush=True)
        try:
            with Interrupt() as interrupt:
                stream = self._model.read(
                    [prompt],
                    self._length,
                    session=session,
                    seed=self._seed,
                    stop=[_AFTER_ANSWER],
                )
                for (text,) in self._model.write(stream, interrupt):
                    print(text, end="", flush=True)
        finally:
            print("\n")
        unread = _unread(stream.texts[0] + stream.rests[0])
        self._before, self._now = before, Turn(stream.session, unread, message)

    def save(self, path: str) -> None:
        """Write the conversation, up to where a message begins."""
        from rwkv_jax import generation

        session, unread, message = self._now
        if unread:
            session = self._model.read([unread], 0, session=session, seed=self._seed).session
            self._now = Turn(session, "", message)
        assert session is not None
        generation.save(path, session)

    def load(self, path: str) -> None:
        """Go on with the conversation in a file."""
        session = self._model.load(path)
        if len(session.positions) != 1:
            raise ValueError(f"{path}: the file has {len(session.positions)} rows; accepted is 1")
        self._now = self._before = Turn(session, "")

    def command(self, name: str, argument: str) -> str:
        """Carry out what a line with a slash says, and return what to print.

        Raises:
          OSError, ValueError: a file cannot be written or read.
          ValueError, FloatingPointError: as `answer` raises them.
        """
        if name in ("/save", "/load") and not argument:
            return f"{name} needs the name of a file"
        if name == "/save":
            check_target("/save", argument, SESSIONS)
            self.save(argument)
            return f"saved to {argument}"
        if name == "/load":
            self.load(argument)
            return f"loaded from {argument}"
        if name == "/reset":
            self._now = self._before = Turn()
            return "a new conversation"
        if name == "/retry":
            if self._now.message is None:
                return "there is no message to answer"
            # The same seed would give the same answer.
            self._seed = (self._seed + 1) % 2**31
            self.answer(self._now.message, self._before)
            return ""
        if name == "/speed":
            return str(self._model.speed)
        return _HELP if name == "/help" else f"{name} is unknown; /help lists what is known"


def _unread(seen: str) -> str:
    """What stands between an answer and the next message, without what the model has read of it.

    `seen` is the answer, and what follows it. After a stop string that is all, and perhaps more.
    """
    if _AFTER_ANSWER in seen:
        return ""
    lengths = range(len(_AFTER_ANSWER), 0, -1)
    read = next((n for n in lengths if seen.endswith(_AFTER_ANSWER[:n])), 0)
    return _AFTER_ANSWER[read:]
