"""The command-line options of `rwkv-jax train`."""

import argparse
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rwkv_jax import _files, models
from rwkv_jax._commands import train
from rwkv_jax._training import conversations
from rwkv_jax._training.checkpoints import Options
from rwkv_jax._training.compilation import default_cache
from rwkv_jax._training.data import checksum_of
from rwkv_jax._training.devices import AXES
from rwkv_jax._training.option_files import OPTION, with_file
from rwkv_jax._training.parts import ALL, LORA, STATES, patterns, targets
from rwkv_jax._training.tasks import TASKS
from rwkv_jax.finetuning import TARGETS
from rwkv_jax.generation import Sampling
from rwkv_jax.models import rwkv7

VOCABULARY = 256

SIZES: Mapping[str, rwkv7.Config] = {
    "recall": rwkv7.Config(num_layers=3, hidden_size=32, head_size=32, vocab_size=VOCABULARY),
    "tiny": rwkv7.Config(num_layers=2, hidden_size=64, head_size=32, vocab_size=VOCABULARY),
    "demo": rwkv7.Config(num_layers=4, hidden_size=128, head_size=64, vocab_size=VOCABULARY),
    "small": rwkv7.Config(num_layers=6, hidden_size=384, head_size=64, vocab_size=VOCABULARY),
    "0.1b": rwkv7.Config(num_layers=12, hidden_size=768, head_size=64, vocab_size=VOCABULARY),
    "1.5b": rwkv7.Config(num_layers=24, hidden_size=2048, head_size=64, vocab_size=VOCABULARY),
}
OF_MEMORY = {"accumulate", "recompute", "mesh"}
OF_KEEPING = {"save_every", "save_minutes", "keep", "patience", "tensorboard", "profile"}
OF_RESULTS = {"sample", "temperature", "prompt", "judge"}
OF_START = {"options", "dry_run", "out", "resume", "force", "cache", "peak"}
OF_PROCESSES = {"coordinator", "processes", "process"}
MAY_CHANGE = OF_MEMORY | OF_KEEPING | OF_RESULTS | OF_START | OF_PROCESSES
"""Options that a resumed run need not share with the interrupted one. Those of memory change
results by rounding alone, but for what the dropout of an adapter leaves out."""


T = TypeVar("T", int, float, str, Path)


def accepting(
    convert: Callable[[str], T], fits: Callable[[T], bool], accepted: str
) -> Callable[[str], T]:
    """For `type` of an option: values of `convert` that `fits`. `accepted` describes one."""

    def value(text: str) -> T:
        try:
            if fits(x := convert(text)):
                return x
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {accepted}")

    return value


LARGEST = float(np.finfo(np.float32).max)

positive = accepting(int, lambda x: 0 < x < 2**31, "an integer from 1 to 2^31 - 1")
count = accepting(int, lambda x: x > 0, "an integer from 1 on")
natural = accepting(int, lambda x: 0 <= x < 2**31, "an integer from 0 to 2^31 - 1")
share = accepting(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
above_zero = accepting(float, lambda x: 0 < x <= LARGEST, "a positive finite number")
not_negative = accepting(float, lambda x: 0 <= x <= LARGEST, "0 or a positive finite number")
temperature = accepting(
    float, lambda x: bool(Sampling(temperature=x)), "0, or a finite number from 1e-6 on"
)
filled = accepting(str, lambda x: bool(x.encode()), "a text in UTF-8 of at least one character")
path = accepting(_files.expanded, bool, "a path")
address = accepting(
    str,
    lambda x: bool(match := re.fullmatch(r"\S+:(\d+)", x)) and 0 < int(match[1]) < 2**16,
    "HOST:PORT",
)


def cache(text: str) -> str | None:
    """The folder of a cache, perhaps one in the storage of a cloud, for `type` of an option."""
    return None if text == "none" else text if "://" in text else str(path(text))


def mesh_sizes(text: str) -> dict[str, int]:
    """The axis sizes of a mesh, for `type` of an option."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in AXES or axis in sizes or not re.fullmatch("[1-9][0-9]{0,8}", number):
            raise argparse.ArgumentTypeError(
                f"{text!r} has {part!r}; accepted are data=N, model=N and seq=N, each once, with "
                "commas between them"
            )
        sizes[axis] = int(number)
    return sizes


def add_optimizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of how a step changes the parameters."""
    add = parser.add_argument
    add(
        "--accumulate",
        type=positive,
        default=1,
        metavar="PARTS",
        help="save memory: a step computes its batch in so many parts, one after another",
    )
    add(
        "--learning-rate",
        type=not_negative,
        help="learning rate at its peak; if not given, 4e-3 for a new model, 2e-4 for an adapter "
        "and 1e-5 for the parameters of --model",
    )
    add(
        "--states-learning-rate",
        type=not_negative,
        default=0.1,
        help="that of tuned states",
    )
    add("--warmup", type=natural, default=50, help="steps until the peak of the learning rate")
    add(
        "--schedule",
        choices=("cosine", "constant", "wsd"),
        default="cosine",
        help="learning rate after the warmup: falls along a cosine, is constant, or is constant "
        "until it falls linearly in the last steps (wsd)",
    )
    add("--decay-share", type=share, default=0.2, help="share of the steps in which wsd falls")
    add(
        "--final-learning-rate",
        type=not_negative,
        help="learning rate after the last step of cosine and wsd; a twentieth of the peak if not "
        "given",
    )
    add("--weight-decay", type=not_negative, default=0.1, help="weight decay of matrices")
    add(
        "--clip",
        type=not_negative,
        default=1.0,
        metavar="NORM",
        help="greatest norm of all gradients together, to which larger ones are scaled; 0 is off",
    )
    add(
        "--moments",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the first moments of AdamW; the second ones are float32",
    )
    add(
        "--ema",
        type=accepting(float, lambda x: 0 < x < 1, "a number between 0 and 1"),
        metavar="DECAY",
        help="also evaluate and write the exponential moving average of what is trained, of which "
        "each step back counts so much less; no average if not given",
    )


def add_keeping_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of what a run keeps, and when it ends."""
    add = parser.add_argument
    add("--save-every", type=positive, default=500, help="steps between checkpoints")
    add("--save-minutes", type=above_zero, help="also save after so many minutes without")
    add("--keep", type=positive, default=2, help="newest checkpoints to keep")
    add(
        "--best",
        action="store_true",
        help="also keep the checkpoint with the lowest held-out loss, and make it the result",
    )
    add("--patience", type=positive, help="end after so many held-out losses without a lower one")
    add("--tensorboard", action="store_true", help="write the metrics for TensorBoard as well")
    add(
        "--profile",
        type=path,
        metavar="FOLDER",
        help="folder for a profile of steps 8 to 10 after the start or --resume, for XProf and "
        "Perfetto",
    )


def check_optimizer(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    rows = (args.mesh or {}).get("data", 1) * args.accumulate
    if args.accumulate > 1 and args.batch % rows:
        parser.error(
            f"--accumulate is {args.accumulate} where --batch is {args.batch}; --accumulate times "
            "data of --mesh has to divide --batch"
        )


def check_keeping(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.tensorboard:
        try:
            importlib.import_module("tensorboardX")
        except ImportError as error:
            parser.error(f"--tensorboard needs the package tensorboardX: {error}")


def add_pieces(parser: argparse.ArgumentParser) -> None:
    """Options of rows that are longer than memory."""
    add = parser.add_argument
    add(
        "--piece",
        type=positive,
        help="read so many tokens of a row at once, with the state from one piece to the next, so "
        "that memory does not grow with --context",
    )
    add(
        "--truncate",
        action="store_true",
        help="no gradients through the states between pieces",
    )


def check_pieces(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.truncate and not args.piece:
        parser.error("--truncate needs --piece")
    if args.piece and args.context % args.piece:
        parser.error(
            f"--piece is {args.piece} where --context is {args.context}; accepted is a divisor"
        )
    if args.piece and args.piece % (parts := (args.mesh or {}).get("seq", 1)):
        parser.error(
            f"--mesh has seq={parts} where --piece is {args.piece}; accepted is a divisor of it"
        )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model and its tokenizer."""
    add = parser.add_argument_group("model").add_argument
    sizes = ", ".join(f"{n} = {c.num_layers}x{c.hidden_size}" for n, c in SIZES.items())
    add(
        "--model",
        type=filled,
        help="a checkpoint of RWKV-7, or on one device of RWKV-5 or 6, to start from, whose sizes "
        "replace that of --size: a .pth or .safetensors file or a folder, as the other commands "
        "take it",
    )
    add("--size", choices=SIZES, default="demo", help=f"layers x width: {sizes}")
    add("--layers", type=positive, help="number of layers, instead of that of --size")
    add("--width", type=positive, help="width, instead of that of --size")
    add("--head-size", type=positive, help="head size, instead of that of --size")
    add(
        "--vocabulary",
        type=accepting(int, lambda x: 256 <= x < 2**31, "an integer from 256 to 2^31 - 1"),
        default=VOCABULARY,
        help="tokens of the embedding and the head of a new model",
    )
    add(
        "--tokenizer",
        type=filled,
        help="world, bytes, or the path of a tokenizer.json or of a vocabulary of RWKV; by default "
        "that of --model, and bytes for a new model",
    )


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What the model is trained on."""
    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        type=filled,
        action="append",
        metavar="FILE[=WEIGHT]",
        help="a text, or a folder of texts; a .jsonl file with `text` or `messages` in each line; "
        "or a .bin file with its .idx file. Repeat it for several, whose weights are shares of the "
        "rows. Without it a model of bytes is trained on the standard library of Python",
    )
    add(
        "--validation",
        type=filled,
        default="0.05",
        metavar="SHARE|FILE",
        help="the share of the documents that is held out, or a file of others",
    )
    add("--pattern", type=filled, default="*.py", help="files of a folder to read, at any depth")
    add(
        "--separator",
        metavar="LINE",
        help="the line between two documents of a text, such as '<|endoftext|>'; if not given, "
        "each file is a document",
    )
    add(
        "--template",
        type=filled,
        metavar="FILE",
        help="the template of messages, or 'none' for the format of the G1 models; by default the "
        "one in the folder --adapter or else --model, if there is one",
    )
    add(
        "--tools",
        type=filled,
        metavar="FILE",
        help="a JSON list of the functions that messages may call, each with a name, a description "
        "and parameters; the `tools` of a line are taken instead of these",
    )
    add(
        "--task",
        choices=TASKS,
        help="questions and answers instead of --data: reverse, digits from the last to the first; "
        "sets the defaults of other options, which --task NAME --help shows",
    )
    add("--longest", type=positive, help="greatest length of questions, instead of the task's")
    add("--growth", type=share, default=0.2, help="share of the steps until questions are so long")
    add("--judge", type=positive, default=100, help="questions of each length at the end of a task")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """What of the model is trained."""
    add = parser.add_argument_group("what is trained").add_argument
    add(
        "--train",
        type=filled,
        default=ALL,
        metavar="WHAT",
        help="all; lora, low-rank matrices beside those of --model; states, those before the first "
        "token; a pattern of the names of parameters, such as 'blocks.1[01].*'; or several of "
        "these, with commas between them",
    )
    add(
        "--base",
        choices=("float32", "bfloat16", "int8"),
        help="what the parameters that are not trained are stored in; as in the file if not given",
    )
    add("--adapter", type=filled, metavar="FOLDER", help="go on with this adapter")
    add("--lora-rank", type=positive, default=32, help="rank of a new adapter")
    add("--lora-alpha", type=above_zero, help="its factor alpha; the rank if not given")
    add(
        "--lora-dropout",
        type=accepting(float, lambda x: 0 <= x < 1, "a number from 0 to below 1"),
        default=0.0,
        help="share of the inputs of an adapter that are left out in training",
    )
    add(
        "--lora-targets",
        type=filled,
        default=",".join(TARGETS),
        metavar="PATTERNS",
        help="matrices that get an adapter",
    )
    add("--rslora", action="store_true", help="divide alpha by the square root of the rank")
    add(
        "--dora",
        action="store_true",
        help="DoRA: a new adapter also has a magnitude for each output of a matrix",
    )
    add("--initial-state", type=filled, metavar="FILE", help="go on with these tuned states")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rwkv-jax train",
        description=train.HELP,
        epilog="\n  ".join(["examples:", *(f"rwkv-jax {line}" for line in train.EXAMPLES)]),
        formatter_class=_Help,
    )
    add_model_arguments(parser)
    add_data_arguments(parser)
    add_target_arguments(parser)
    add = parser.add_argument
    add("--steps", type=positive, default=1000, help="optimizer steps")
    add("--batch", type=positive, default=8, help="sequences in each step")
    add("--context", type=positive, default=128, help="tokens in each sequence")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the activations",
    )
    add(
        "--implementation",
        choices=("ffi", "xla", "reference"),
        help="implementation of wkv7; the best one if not given",
    )
    add(
        "--recompute",
        choices=("mixes", "cheap", "blocks"),
        help="save memory: the backward pass computes again the mixes of tokens, what is cheap, or "
        "whole blocks",
    )
    add_pieces(parser)
    add_optimizer_arguments(parser)
    add(
        "--l2-wrap",
        type=not_negative,
        default=1e-4,
        help="gradient of the largest logit towards 0, as in the official training; 0 is off",
    )
    add("--seed", type=natural, default=0, help="seed of parameters, data order and sample")
    add("--eval-every", type=positive, default=250, help="steps between held-out losses")
    add("--eval-tokens", type=count, default=65536, help="held-out tokens that are predicted")
    add_keeping_arguments(parser)
    add("--out", type=path, default=Path("out/train"), help="output folder")
    add(
        "--cache",
        type=cache,
        default=default_cache(),
        help="folder of compiled programs, which later runs read; 'none' is no folder",
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--resume", action="store_true", help="continue from the newest checkpoint in --out"
    )
    earlier.add_argument(
        "--force",
        action="store_true",
        help="start anew and replace the earlier run in --out; its checkpoints are deleted when "
        "this run has written one, and until then --resume still continues the earlier run",
    )
    add(
        "--prompt",
        type=filled,
        help="text that the sample continues; by default the begin of a held-out document",
    )
    add("--sample", type=positive, default=500, help="tokens of text to generate at the end")
    add("--temperature", type=temperature, default=0.9, help="temperature of the sample")
    add("--mesh", type=mesh_sizes, help="devices, as in data=2,model=2,seq=2; one if not given")
    add(
        "--coordinator",
        type=address,
        metavar="HOST:PORT",
        help="address of the first of several processes; not needed with Slurm, Open MPI and "
        "Kubernetes",
    )
    add(
        "--processes",
        type=positive,
        help="number of processes; 1 is this process alone, whatever has started it",
    )
    add("--process", type=natural, help="number of this process, from 0")
    add(
        "--peak",
        type=above_zero,
        help="peak TFLOP/s of a device, to print how much is used",
    )
    add(
        OPTION,
        type=path,
        metavar="FILE",
        help="TOML file of options, such as learning-rate = 1e-3; those of the command line count "
        "more",
    )
    add(
        "--dry-run",
        action="store_true",
        help="print the sizes of the run, its memory and an estimate of its speed, and end",
    )
    argv = with_file(parser, sys.argv[1:] if argv is None else argv)
    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--task", choices=TASKS)
    if name := task.parse_known_args(argv)[0].task:
        parser.set_defaults(**TASKS[name].options)
    args = parser.parse_args(argv)
    for check in (check_pieces, check_optimizer, check_keeping):
        check(parser, args)
    if args.task and args.data:
        parser.error("--data and --task exclude each other")
    if args.model and (
        args.layers or args.width or args.head_size or args.vocabulary != VOCABULARY
    ):
        parser.error("--model excludes --layers, --width, --head-size and --vocabulary")
    if not args.model:
        if args.train != ALL or args.base:
            parser.error(
                "there is no --model; accepted for a new one is --train all, without --base"
            )
        try:
            new_config(args)
        except ValueError as error:
            parser.error(f"--width and --head-size: {error}")
    if args.tokenizer and not args.data:
        parser.error("--tokenizer needs --data; all other data are bytes")
    named = targets(args.train)
    if ALL in named and len(named) > 1:
        parser.error(f"--train is {args.train}; accepted is all, or what is not all of it")
    for option, target in ((args.adapter, LORA), (args.initial_state, STATES)):
        if option and target not in named:
            parser.error("--adapter needs --train lora, and --initial-state --train states")
    if (args.rslora or args.dora) and (LORA not in named or args.adapter):
        parser.error("--rslora and --dora need --train lora, and a new adapter, without --adapter")
    if STATES in named and args.task:
        parser.error("--train states and --task exclude each other")
    if not args.data and args.prompt is None:
        args.prompt = "class "
    if args.learning_rate is None:
        finetunes = 1e-5 if patterns(args.train) else 2e-4
        args.learning_rate = finetunes if args.model else 4e-3
    several = (args.coordinator, args.processes, args.process)
    if several not in ((None, None, None), (None, 1, None)):
        if None in several:
            parser.error("--coordinator, --processes and --process go together")
        if args.process not in range(args.processes):
            parser.error(f"--process is {args.process}; accepted is 0 to {args.processes - 1}")
    return args


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def new_config(args: argparse.Namespace) -> rwkv7.Config:
    """The sizes of a new model that the options ask for."""
    sizes = {"num_layers": args.layers, "hidden_size": args.width, "head_size": args.head_size}
    sizes["vocab_size"] = args.vocabulary
    return dataclasses.replace(SIZES[args.size], **{n: s for n, s in sizes.items() if s})


def base(args: argparse.Namespace) -> models.Checkpoint | None:
    """The model of --model without its arrays."""
    if not args.model:
        return None
    try:
        found = models.inspect(args.model)
    except (OSError, ValueError) as error:
        sys.exit(f"--model: {error}")
    if found.module is models.rwkv4 or (found.module is not rwkv7 and args.mesh):
        accepted = "RWKV-7" if args.mesh else "RWKV-5 to 7"
        sys.exit(f"--model is {found.generation}; accepted is {accepted}")
    if not args.data and found.config.vocab_size != VOCABULARY:
        sys.exit(
            f"--model has {found.config.vocab_size} different tokens; accepted without --data is "
            f"one with the {VOCABULARY} bytes"
        )
    return found


def config(args: argparse.Namespace) -> Any:
    """The sizes of the model that the options ask for."""
    found = base(args)
    return new_config(args) if found is None else found.config


def recorded(args: argparse.Namespace, checksums: Sequence[Sequence[int]]) -> Options:
    """The options that a resumed run has to share, by name. `checksums` stand for the data."""
    options = {name: x for name, x in vars(args).items() if name not in MAY_CHANGE}
    found, sizes = base(args), config(args)
    template = args.template if args.template == "none" else conversations.template(args)
    return options | {
        "data": checksums,
        # Their paths may change, but not what they have.
        "model": found and checksum_of(map(Path, found.files)),
        "template": checksum_of([template]) if isinstance(template, Path) else template,
        "tools": args.tools and checksum_of([_files.expanded(args.tools)]),
        "layers": sizes.num_layers,
        "width": sizes.hidden_size,
        "head_size": sizes.head_size,
        "vocabulary": sizes.vocab_size,
    }
