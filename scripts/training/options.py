"""The command-line options of train.py."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rwkv_jax import models
from rwkv_jax.models import rwkv7
from training.checkpoints import Options
from training.devices import AXES
from training.tasks import TASKS

VOCABULARY = 256

SIZES: Mapping[str, rwkv7.Config] = {
    "recall": rwkv7.Config(layers=3, width=32, head_size=32, vocabulary=VOCABULARY),
    "tiny": rwkv7.Config(layers=2, width=64, head_size=32, vocabulary=VOCABULARY),
    "demo": rwkv7.Config(layers=4, width=128, head_size=64, vocabulary=VOCABULARY),
    "small": rwkv7.Config(layers=6, width=384, head_size=64, vocabulary=VOCABULARY),
    "0.1b": rwkv7.Config(layers=12, width=768, head_size=64, vocabulary=VOCABULARY),
    "1.5b": rwkv7.Config(layers=24, width=2048, head_size=64, vocabulary=VOCABULARY),
}
MAY_CHANGE = {"out", "resume", "save_every", "sample", "temperature", "prompt", "peak", "recompute"}
MAY_CHANGE |= {"judge", "mesh", "coordinator", "processes", "process"}
"""Options that a resumed run need not share with the interrupted one."""


def positive(text: str) -> int:
    """A positive integer, for `type` of an option."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def share(text: str) -> float:
    """A number from 0 to 1, for `type` of an option."""
    if not 0 <= (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return number


def mesh_sizes(text: str) -> dict[str, int]:
    """The axis sizes of a mesh, for `type` of an option."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, number = part.partition("=")
        if axis not in AXES or axis in sizes or not number.isdecimal() or int(number) < 1:
            raise argparse.ArgumentTypeError(
                f"{text!r} has {part!r}; accepted are data=N, model=N and seq=N, each once, with "
                "commas between them"
            )
        sizes[axis] = int(number)
    return sizes


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level RWKV-7 language model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    sizes = ", ".join(f"{n} = {c.layers}x{c.width}" for n, c in SIZES.items())
    add("--size", choices=SIZES, default="demo", help=f"layers x width: {sizes}")
    add("--layers", type=positive, help="number of layers, instead of that of --size")
    add("--width", type=positive, help="width, instead of that of --size")
    add("--head-size", type=positive, help="head size, instead of that of --size")
    add("--model", help="a checkpoint of RWKV-7 to start from, whose sizes replace that of --size")
    add("--data", type=Path, help="a file, or a folder of files; the standard library if not given")
    add(
        "--task",
        choices=TASKS,
        help="questions and answers instead of --data: reverse, digits from the last to the first; "
        "sets the defaults of other options, which --task NAME --help shows",
    )
    add("--longest", type=positive, help="greatest length of questions, instead of the task's")
    add("--growth", type=share, default=0.2, help="share of the steps until questions are so long")
    add("--judge", type=positive, default=100, help="questions of each length at the end of a task")
    add("--pattern", default="*.py", help="which files of a folder to read, at any depth")
    add("--steps", type=positive, default=1000, help="optimizer steps")
    add("--batch", type=positive, default=8, help="sequences in each step")
    add("--context", type=positive, default=128, help="bytes in each sequence")
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
    add(
        "--scan",
        action="store_true",
        help="compile one block for all but the first; a checkpoint resumes with the same choice",
    )
    add("--learning-rate", type=float, default=4e-3, help="learning rate at its peak")
    add("--warmup", type=int, default=50, help="steps until the peak of the learning rate")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices")
    add(
        "--l2-wrap",
        type=float,
        default=1e-4,
        help="gradient of the largest logit towards 0, as in the official training; 0 is off",
    )
    add("--seed", type=int, default=0, help="seed of parameters, data order and sample")
    add("--eval-every", type=positive, default=250, help="steps between held-out losses")
    add("--eval-bytes", type=positive, default=65536, help="held-out bytes that are predicted")
    add("--save-every", type=positive, default=500, help="steps between checkpoints")
    add("--out", type=Path, default=Path("out/train"), help="output folder")
    add("--resume", action="store_true", help="continue from the checkpoint in --out")
    add("--prompt", default="class ", help="text that the sample continues")
    add("--sample", type=positive, default=500, help="bytes of text to generate at the end")
    add("--temperature", type=float, default=0.9, help="temperature of the sample")
    add("--mesh", type=mesh_sizes, help="devices, as in data=2,model=2,seq=2; one if not given")
    add("--coordinator", metavar="HOST:PORT", help="address of the first of several processes")
    add("--processes", type=positive, help="number of processes")
    add("--process", type=int, help="number of this process, from 0")
    add("--peak", type=float, help="peak TFLOP/s of a device, to print which share of it is used")
    task = argparse.ArgumentParser(add_help=False)
    task.add_argument("--task", choices=TASKS)
    if name := task.parse_known_args(argv)[0].task:
        parser.set_defaults(**TASKS[name].options)
    args = parser.parse_args(argv)
    if args.task and args.data:
        parser.error("--data and --task exclude each other")
    if args.model and (args.layers or args.width or args.head_size):
        parser.error("--model excludes --layers, --width and --head-size")
    several = (args.coordinator, args.processes, args.process)
    if several != (None, None, None):
        if None in several:
            parser.error("--coordinator, --processes and --process go together")
        if args.process not in range(args.processes):
            parser.error(f"--process is {args.process}; accepted is 0 to {args.processes - 1}")
    return args


def config(args: argparse.Namespace) -> rwkv7.Config:
    """The sizes of the model that the options ask for."""
    if args.model:
        found = models.inspect(args.model)
        config, quantised = found.config, found.params.head.scale is not None
        of_bytes = isinstance(config, rwkv7.Config) and config.vocabulary == VOCABULARY
        if quantised or not of_bytes:
            how = ", quantised" if quantised else ""
            sys.exit(
                f"--model is {found.generation} with {config.vocabulary} different tokens{how}; "
                f"accepted is RWKV-7 with the {VOCABULARY} bytes, not quantised"
            )
        return config
    sizes = {"layers": args.layers, "width": args.width, "head_size": args.head_size}
    return dataclasses.replace(SIZES[args.size], **{n: s for n, s in sizes.items() if s})


def recorded(args: argparse.Namespace, checksum: int | None) -> Options:
    """The options that a resumed run has to share, by name. `checksum` stands for the data."""
    options = {name: x for name, x in vars(args).items() if name not in MAY_CHANGE}
    return options | {"data": checksum, **dataclasses.asdict(config(args))}
