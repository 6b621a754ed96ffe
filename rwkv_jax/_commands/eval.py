"""`rwkv-jax eval`: how good a model is, on a text or on tasks."""

import argparse

from rwkv_jax._commands import eval_tasks, eval_text
from rwkv_jax._commands.arguments import (
    add_adapter,
    add_dtype,
    add_initial_state,
    add_model,
    add_tokenizer,
    natural,
    positive,
)

HELP = "Measure how good a model is: on a text, on LAMBADA, with passkeys or on tasks of lm-eval."
EXAMPLES = (
    "eval model.pth --text book.txt",
    "eval model.pth --text book.txt --context 16384 --batch 2 --dtype bfloat16 --plot loss.png",
    "eval rwkv-4.pth --text book.txt --tokenizer 20B_tokenizer.json --json",
    "eval model.pth --lambada lambada_test.jsonl --dtype bfloat16",
    "eval model.pth --passkey 4096 16384 65536 --samples 10",
    "eval model.pth --tasks arc_easy,hellaswag --shots 5 --batch 32",
)

_OPTIONS = {
    "text": ("context", "plot"),
    "passkey": ("samples", "seed"),
    "tasks": ("include_path", "shots", "limit"),
}
"""The options that only one way to evaluate has."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="FILE", help="a text in UTF-8: bits per byte and losses")
    what.add_argument(
        "--lambada",
        metavar="FILE",
        help='accuracy and perplexity of the last words of passages, {"text": ...} in each line',
    )
    what.add_argument(
        "--passkey",
        metavar="LENGTH",
        type=positive,
        nargs="+",
        help="whether a number in a text of so many tokens is found again, at several depths",
    )
    what.add_argument(
        "--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness, with commas between them"
    )
    add_adapter(parser)
    add_initial_state(parser)
    add_tokenizer(parser)
    parser.add_argument(
        "--batch", type=positive, default=8, help="rows that are read at once (default: 8)"
    )
    add_dtype(parser, "dtype of weights and activations (default: float32)", "float32")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as a JSON object, where a figure that no float holds is null",
    )
    text = parser.add_argument_group("with --text")
    text.add_argument(
        "--context",
        type=positive,
        help="tokens of a window; the model starts anew at each window (default: 4096)",
    )
    text.add_argument(
        "--plot", metavar="FILE", help="write a picture of the loss by position to this file"
    )
    passkey = parser.add_argument_group("with --passkey")
    passkey.add_argument(
        "--samples", type=positive, help="texts of each length and depth (default: 4)"
    )
    passkey.add_argument("--seed", type=natural, help="what the texts depend on (default: 0)")
    tasks = parser.add_argument_group("with --tasks")
    tasks.add_argument("--include-path", metavar="FOLDER", help="tasks of your own, in YAML files")
    tasks.add_argument("--shots", type=natural, help="examples before each question")
    tasks.add_argument("--limit", type=positive, help="so many questions of each task at most")


def run(arguments: argparse.Namespace) -> int:
    for what, names in _OPTIONS.items():
        for name in names:
            if getattr(arguments, what) is None and getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --{what}")
    if arguments.text is not None:
        eval_text.run(arguments)
    elif arguments.lambada is not None:
        eval_tasks.lambada(arguments)
    elif arguments.passkey is not None:
        eval_tasks.passkey(arguments)
    else:
        eval_tasks.harness(arguments)
    return 0
