"""`rwkv-jax generate`: text that continues a prompt."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_jax._commands.arguments import (
    add_adapter,
    add_dtype,
    add_initial_state,
    add_model,
    add_tokenizer,
    positive,
)
from rwkv_jax._commands.interrupt import Interrupt
from rwkv_jax._commands.output import SESSIONS, check_target
from rwkv_jax._commands.sampling import add_sampling, seed_of
from rwkv_jax._commands.text_model import TextModel

if TYPE_CHECKING:
    from rwkv_jax.generation import TextStream

HELP = "Write text that continues a prompt, as it comes."
EXAMPLES = (
    "generate model.pth --prompt 'The elephant is'",
    "generate model.pth --prompt-file story.txt --tokens 500 --temperature 0.8 --stop 'THE END'",
    "generate model.pth --prompt-file book.txt --tokens 0 --save-state book.safetensors",
    "generate model.pth --initial-state tuned.pth --prompt 'User: Hello'",
    "generate model.pth --load-state book.safetensors --prompt 'Summary:' --batch 1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="a file with the text, in UTF-8")
    parser.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--batch",
        type=positive,
        help="write so many texts, with the seeds that follow --seed (default: 1, or as many as "
        "--load-state has)",
    )
    parser.add_argument(
        "--load-state",
        metavar="FILE",
        help="go on where --save-state was: without a prompt as if it had never ended",
    )
    parser.add_argument(
        "--save-state", metavar="FILE", help="write the state at the end to a .safetensors file"
    )
    add_adapter(parser)
    add_initial_state(parser)
    add_tokenizer(parser)
    add_dtype(parser, "dtype of weights and activations (default: float32)", "float32")
    add_sampling(parser, 200)


def run(arguments: argparse.Namespace) -> int:
    from rwkv_jax import generation

    prompt = _prompt(arguments)
    if arguments.save_state is not None:
        check_target("--save-state", arguments.save_state, SESSIONS)
    if arguments.load_state is not None and arguments.initial_state is not None:
        raise ValueError("--initial-state with --load-state; accepted is one of them")
    model = TextModel(arguments)
    session, seed = None, arguments.seed
    if arguments.load_state is not None:
        session = model.load(arguments.load_state)
    else:
        seed = seed_of(arguments)
    batch = arguments.batch or (1 if session is None else len(session.positions))
    with Interrupt() as interrupt:
        stream = model.read(
            *([prompt] * batch, arguments.tokens), session=session, seed=seed, stop=arguments.stop
        )
        try:
            for texts in model.write(stream, interrupt):
                if batch == 1:
                    print(texts[0], end="", flush=True)
        except FloatingPointError:
            # Of some rows. All others have ended.
            _print_end(stream)
            raise
    _print_end(stream)
    session = stream.session
    if arguments.save_state is not None:
        generation.save(arguments.save_state, session)
    reasons = ", ".join("interrupted" if x == "stopped" else str(x) for x in stream.finish_reasons)
    print(f"{model.speed}; seed {session.seeds[0]}; ended by: {reasons}", file=sys.stderr)
    return 130 if interrupt.requested else 0


def _print_end(stream: "TextStream") -> None:
    """Print what was not printed as it came: the texts of several rows, but for those that failed,
    or the end of the line of a single one."""
    batch = len(stream.texts)
    if batch > 1:
        seeds = stream.session.seeds
        for row, text in enumerate(stream.texts):
            if stream.finish_reasons[row] != "failed":
                print(f"--- {row + 1} of {batch}, seed {seeds[row]}\n{text}")
    elif stream.texts[0]:
        print()


def _prompt(arguments: argparse.Namespace) -> str:
    """The prompt, which is empty only where a state goes on.

    Raises:
      OSError, ValueError: there is no prompt, or no text in the file.
    """
    prompt = arguments.prompt or ""
    if arguments.prompt_file is not None:
        try:
            prompt = Path(arguments.prompt_file).read_bytes().decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{arguments.prompt_file}: no text in UTF-8: {error}") from None
    if not prompt and arguments.load_state is None:
        raise ValueError(
            "there is no text to continue; accepted are --prompt and --prompt-file with one, and "
            "--load-state"
        )
    return prompt
