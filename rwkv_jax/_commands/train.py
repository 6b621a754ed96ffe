"""`rwkv-jax train`: a new model, or what is finetuned of a published one."""

import argparse

HELP = "Train a new RWKV-7, or finetune a published one: all of it, parts, an adapter or states."
EXAMPLES = (
    "train",
    "train --data book.txt --size small --steps 20000",
    "train --model model.pth --data talks.jsonl --train lora --dtype bfloat16 --context 4096",
    "train --model model.pth --data talks.jsonl --train states --steps 500",
    "train --model model.pth --data books.bin=3 --data talks.jsonl --train lora --base int8",
    "train --resume",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # Some defaults depend on other options, and what knows all of them needs the extra `train`.
    # So everything that follows goes to the parser of the run, --help included.
    parser.prefix_chars = ""
    parser.add_argument("options", nargs="*")


def run(arguments: argparse.Namespace) -> int:
    try:
        from rwkv_jax._training import run as training
    except ImportError as error:
        raise ImportError(
            f"the package {error.name} is missing: pip install 'rwkv-jax[train]'"
        ) from error

    return training.main(arguments.options)
