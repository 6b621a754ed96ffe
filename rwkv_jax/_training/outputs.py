"""The folder that a run writes to."""

import argparse
import contextlib
import fcntl
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from rwkv_jax import _files, finetuning, models, tokenizers
from rwkv_jax._training import checkpoints, parts
from rwkv_jax._training.processes import by_first

MODEL, ADAPTER, STATES = "model.safetensors", "adapter", "state.pth"
LOG, PLOT = "log.json", "loss.png"
"""What a finished run has in its folder. The adapter is a folder of PEFT."""

AVERAGES = {MODEL: "ema.safetensors", ADAPTER: "ema-adapter", STATES: "ema-state.pth"}
"""The names of what has the averages of what is trained."""

METRICS = "metrics.jsonl"
"""A file of a run from its begin on."""


@contextlib.contextmanager
def reserved(args: argparse.Namespace) -> Iterator[int]:
    """A context in which no other run writes to --out, with the number of steps after which the run
    goes on: 0, or that of the newest checkpoint with --resume.

    The program exits where the folder cannot be written to, is in use, or has results that neither
    --resume nor --force lets the run replace. A folder that is new and in which nothing is written
    is removed again.
    """
    with contextlib.ExitStack() as lock:

        def first() -> int:
            with written(args.out):
                is_new = not args.out.exists()
                args.out.mkdir(parents=True, exist_ok=True)
                _lock(lock.enter_context(open(args.out / "lock", "a")), args.out)
                if is_new:
                    lock.callback(_remove_unused, args.out)
                tempfile.TemporaryFile(dir=args.out).close()
                for name in _present(args.out, METRICS):
                    if name not in (ADAPTER, AVERAGES[ADAPTER]):
                        open(args.out / name, "r+b").close()
            if args.resume:
                return checkpoints.newest(args.out)
            if not args.force:
                _check_empty(args.out)
            return 0

        yield by_first(first)


def _remove_unused(folder: Path) -> None:
    with contextlib.suppress(OSError):
        if [x.name for x in folder.iterdir()] == ["lock"]:
            shutil.rmtree(folder)


@contextlib.contextmanager
def written(folder: Path) -> Iterator[None]:
    """A context that writes to a folder. The program exits where that fails."""
    try:
        yield
    except OSError as error:
        sys.exit(f"--out {folder} cannot be written to: {error}")


def _lock(file: IO[str], folder: Path) -> None:
    """Lock the file of a folder. The system unlocks it when the process ends, however it ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"--out {folder} is in use by another run; accepted is another folder")
    except OSError as error:
        print(f"--out {folder} has no lock ({error}); start no other run in it", file=sys.stderr)


def _present(folder: Path, *more: str) -> list[str]:
    """The files of a finished run in the folder, and those of `more`."""
    names = (*AVERAGES, *AVERAGES.values(), LOG, PLOT, *more)
    return [name for name in names if (folder / name).exists()]


def _check_empty(folder: Path) -> None:
    names = [checkpoints.path(folder, step).name for step in checkpoints.steps(folder)]
    if names := [*names, *_present(folder)]:
        sys.exit(
            f"--out {folder} has {names[0]} of an earlier run; accepted are --resume, which "
            "continues that run, --force, which replaces it, and another folder"
        )


def results(args: argparse.Namespace) -> list[str]:
    """What of a model a run writes."""
    named = parts.targets(args.train)
    found = {
        MODEL: bool(parts.patterns(args.train)),
        ADAPTER: parts.LORA in named,
        STATES: parts.STATES in named,
    }
    trained = [name for name, there in found.items() if there]
    return [*trained, *(AVERAGES[name] for name in trained if args.ema)]


def save(args: argparse.Namespace, result: parts.Parts, average: parts.Parts | None) -> None:
    """Write what of a model was trained, and its average if there is one, in place of what an
    earlier run has written, but for what this run began with."""
    written = results(args)
    others = {*AVERAGES, *AVERAGES.values()} - {*written}
    given = [_files.expanded(x) for x in (args.model, args.adapter, args.initial_state) if x]
    # --model may be a folder with one of these files.
    began = {(x / name).resolve() for x in given for name in (".", MODEL, AVERAGES[MODEL])}
    for path in (args.out / name for name in others):
        if path.is_dir() and path.resolve() not in began:
            shutil.rmtree(path)
        elif path.resolve() not in began:
            path.unlink(missing_ok=True)
    _save(args, result, {name: args.out / name for name in AVERAGES if name in written})
    if average is not None:
        paths = {of: args.out / name for of, name in AVERAGES.items() if name in written}
        _save(args, average, paths)


def _save(args: argparse.Namespace, result: parts.Parts, paths: Mapping[str, Path]) -> None:
    if MODEL in paths:
        models.save(paths[MODEL], result.params)
    if ADAPTER in paths:
        names = "hf" if hasattr(result.params.blocks[0].att, "r_k") else "official"
        base = str(paths.get(MODEL, args.model))
        finetuning.save_adapter(paths[ADAPTER], result.adapter, names=names, base=base)
    if STATES in paths:
        models.save_state(paths[STATES], result.initial_state(1, "float32"))


def command(args: argparse.Namespace, vocabulary: int, tokenizer: str | None) -> list[str]:
    """The command line that writes text with the results, but for the prompt. `tokenizer` is the
    name of the one of the data."""
    written = results(args)
    model = str(args.out / MODEL) if MODEL in written else args.model
    line = ["rwkv-jax", "generate", model]
    if ADAPTER in written:
        line += ["--adapter", str(args.out / ADAPTER)]
    if STATES in written:
        line += ["--initial-state", str(args.out / STATES)]
    usual = None
    with contextlib.suppress(ValueError):
        usual = tokenizers.for_vocabulary(vocabulary, checkpoint=model)
    return line if tokenizer in (None, usual) else [*line, "--tokenizer", tokenizer]
