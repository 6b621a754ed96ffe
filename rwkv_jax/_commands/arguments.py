"""Arguments that several commands have."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rwkv_jax.tokenizers import Tokenizer

DTYPES = ("bfloat16", "float16", "float32")


def add_model(parser: argparse.ArgumentParser, name: str = "model") -> None:
    """The checkpoint that a command reads."""
    parser.add_argument(
        name,
        metavar=name.upper(),
        help="a .pth or .safetensors file, the index of several, or a folder with one of these",
    )


def add_dtype(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    """The name of a dtype. `meaning` says what has the dtype."""
    parser.add_argument("--dtype", choices=DTYPES, default=default, help=meaning)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """The tokenizer of the argument `model`."""
    parser.add_argument(
        "--tokenizer",
        help="world, bytes, or the path of a tokenizer.json or of a vocabulary of RWKV (default: "
        "the file in the folder MODEL, or what the size of the vocabulary tells)",
    )


def add_adapter(parser: argparse.ArgumentParser) -> None:
    """What is beside the matrices of the argument `model`."""
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="folder of PEFT with an adapter of LoRA or DoRA for the model",
    )


def with_adapter(arguments: argparse.Namespace, params: Any) -> Any:
    """The parameters with the adapter of a command line, if it has one.

    Raises:
      FileNotFoundError, ValueError: as `finetuning.load_adapter` raises them.
    """
    if arguments.adapter is None:
        return params
    from rwkv_jax import finetuning

    adapter = finetuning.load_adapter(arguments.adapter, params, dtype=arguments.dtype)
    return finetuning.adapted(params, adapter)


def add_initial_state(parser: argparse.ArgumentParser) -> None:
    """What every text of the argument `model` starts from."""
    parser.add_argument(
        "--initial-state",
        metavar="FILE",
        help="start from this state, which state tuning has made, in place of an empty one",
    )


def tokenizer_of(arguments: argparse.Namespace, vocabulary: int) -> "Tokenizer":
    """The tokenizer of a model with so many tokens.

    Raises:
      FileNotFoundError, ImportError, ValueError: as `rwkv_jax.tokenizers` raises them.
    """
    from rwkv_jax import tokenizers

    name = arguments.tokenizer or tokenizers.for_vocabulary(vocabulary, checkpoint=arguments.model)
    return tokenizers.load(name, vocabulary)


def positive(text: str) -> int:
    """The integer above 0 in an argument.

    Raises:
      ArgumentTypeError: there is none.
    """
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def natural(text: str) -> int:
    """The integer from 0 to 2^31 - 1 in an argument.

    Raises:
      ArgumentTypeError: there is none.
    """
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer from 0 to 2^31 - 1")
    return int(text)
