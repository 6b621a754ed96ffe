"""The commands of `python -m rwkv_jax`, which are also those of the script `rwkv-jax`.

Each command is a module with

- `HELP`: one sentence, which says what the command does;
- `EXAMPLES`: command lines, without the name of the program;
- `add_arguments(parser)`: adds the arguments of the command to an `argparse.ArgumentParser`;
- `run(arguments) -> int`: runs the command and returns the exit status.

`run` raises a `ValueError`, an `OSError`, an `ImportError` or a `FloatingPointError` whose message
is for the user: `main` prints it without a traceback.
"""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence

import rwkv_jax
from rwkv_jax._commands import average, chat, convert, doctor, eval, generate, inspect, merge, train

PROGRAM = "rwkv-jax"

COMMANDS = {
    "doctor": doctor,
    "inspect": inspect,
    "convert": convert,
    "merge": merge,
    "average": average,
    "train": train,
    "eval": eval,
    "generate": generate,
    "chat": chat,
}
"""The modules of the commands by name, in the order of the help text."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it parses has the function `run` of the command."""
    everything = argparse.ArgumentParser(
        PROGRAM, description="Commands for language models of RWKV-4 to RWKV-7."
    )
    everything.add_argument("--version", action="version", version=rwkv_jax.__version__)
    commands = everything.add_subparsers(
        dest="command", metavar="COMMAND", required=True, title="commands"
    )
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog="\n  ".join(["examples:", *(f"{PROGRAM} {line}" for line in module.EXAMPLES)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return everything


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of a command line, that of the process if `argv` is None.

    Returns:
      The exit status: that of the command; 2 after an error of the user, of which standard error
      has the reason; 130 after an interrupt from the keyboard; 141 when nobody reads the output
      any more.

    Raises:
      SystemExit: the arguments are wrong, or ask for help or for the version.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal may lack characters that a model writes.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments)
        print(end="", flush=True)  # also where there is no standard output
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever reads the output, such as head, has enough. At its end Python flushes it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        about = "" if error.filename is None else f"{error.filename}: "
        reason = f"{about}{error.strerror or error}"
    except (ValueError, ImportError, FloatingPointError) as error:
        reason = str(error)
    print(f"{PROGRAM} {arguments.command}: {reason}", file=sys.stderr)
    return 2
