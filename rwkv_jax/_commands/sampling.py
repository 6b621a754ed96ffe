"""Arguments of the commands that sample tokens."""

import argparse
import secrets
from typing import TYPE_CHECKING

from rwkv_jax._commands.arguments import natural

if TYPE_CHECKING:
    from rwkv_jax.generation import Sampling
    from rwkv_jax.tokenizers import Tokenizer

_UNCOUNTED = " \t0123456789"


def add_sampling(parser: argparse.ArgumentParser, length: int) -> None:
    """What `sampling_of` and `seed_of` read, and the number of tokens."""
    parser.add_argument(
        "--tokens",
        type=natural,
        metavar="N",
        default=length,
        help=f"the largest number of tokens to write (default: {length})",
    )
    group = parser.add_argument_group(
        "sampling",
        "The defaults are those of the package rwkv. Digits, spaces and tabs add "
        "nothing to counts.",
    )

    def add(name: str, default: float | int, meaning: str) -> None:
        text = f"{meaning} (default: {default})"
        group.add_argument(name, type=type(default), default=default, metavar="X", help=text)

    add("--temperature", 1.0, "0 takes the likeliest token each time")
    add("--top-p", 0.85, "sample from the likeliest tokens with so much probability")
    add("--top-k", 0, "sample from so many tokens at most; 0 for all")
    add("--presence", 0.2, "penalty of tokens that have been written")
    add("--frequency", 0.2, "penalty for each time that they have been written")
    add("--penalty-decay", 0.996, "what is left of a count after each token")
    group.add_argument(
        "--seed", type=natural, metavar="N", help="0 to 2^31 - 1 (default: another one each time)"
    )


def sampling_of(arguments: argparse.Namespace, tokenizer: "Tokenizer") -> "Sampling":
    """The settings of a command line.

    Raises:
      ValueError: a setting is not accepted.
    """
    from rwkv_jax.generation import Sampling

    return Sampling(
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        presence_penalty=arguments.presence,
        frequency_penalty=arguments.frequency,
        decay=arguments.penalty_decay,
        uncounted=[x for x in range(tokenizer.vocab_size) if tokenizer.decode([x]) in _UNCOUNTED],
    )


def seed_of(arguments: argparse.Namespace) -> int:
    """The seed of a command line, or a random one, with room for rows after it."""
    return secrets.randbelow(2**30) if arguments.seed is None else arguments.seed
