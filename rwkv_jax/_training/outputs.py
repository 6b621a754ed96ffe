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
from rwkv_jax._training import checkpoints, conversations, parts
from rwkv_jax._training.processes import by_first
from rwkv_jax.models._checkpoints import saving, text_files

MODEL = ("model.safetensors", "model")
ADAPTER, STATES, LOG, PLOT = "adapter", "state.pth", "log.json", "loss.png"
"""What a finished run has in its folder. A model is a file or, where that of --model is a folder, a
folder. The adapter is a folder of PEFT."""

AVERAGES = {
    **dict(zip(MODEL, ("ema.safetensors", "ema"), strict=True)),
    ADAPTER: "ema-adapter",
    STATES: "ema-state.pth",
}
"""The names of the results with averages, by the names of the results."""

FOLDERS = {name for one in (MODEL[1], ADAPTER) for name in (one, AVERAGES[one])}

METRICS = "metrics.jsonl"
"""A file that a run has from its beginning."""


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
                    if name in FOLDERS:
                        next((args.out / name).iterdir(), None)
                    else:
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


def _names_of_folder(args: argparse.Namespace) -> saving.Names | None:
    """The names by which the model that a run writes is a folder; None if it is a file, or the run
    writes none."""
    if not args.model or not parts.patterns(args.train):
        return None
    form = models.inspect(args.model).params
    whole = text_files.is_folder_of_model(_files.expanded(args.model))
    wanted = whole or saving.needs_folder(form) or conversations.template(args) is not None
    return saving.names_of_folder(args.model, form) if wanted else None


def results(args: argparse.Namespace) -> list[str]:
    """What of a model a run writes."""
    named = parts.targets(args.train)
    in_folder = _names_of_folder(args) is not None
    found = {
        MODEL[in_folder]: bool(parts.patterns(args.train)),
        ADAPTER: parts.LORA in named,
        STATES: parts.STATES in named,
    }
    trained = [name for name, there in found.items() if there]
    return [*trained, *(AVERAGES[name] for name in trained if args.ema)]


def save(args: argparse.Namespace, result: parts.Parts, average: parts.Parts | None) -> None:
    """Write what of a model was trained, and its average if there is one, in place of what an
    earlier run has written, but for what this run began with."""
    written, beside = results(args), conversations.beside(args)
    others = {*AVERAGES, *AVERAGES.values()} - {*written}
    given = [_files.expanded(x) for x in (args.model, args.adapter, args.initial_state) if x]
    # --model may be a folder with one of these files.
    of_models = [*MODEL, *(AVERAGES[name] for name in MODEL)]
    began = {(x / name).resolve() for x in given for name in (".", *of_models)}
    for path in (args.out / name for name in others):
        if path.is_dir() and path.resolve() not in began:
            shutil.rmtree(path)
        elif path.resolve() not in began:
            path.unlink(missing_ok=True)
    for path in (args.out / name for name in written):
        if path.is_dir() and path.resolve() not in began:
            text_files.remove(path)
    for one, averages in ((result, False), (average, True)):
        if one is not None:
            paths = {of: args.out / (name if averages else of) for of, name in AVERAGES.items()}
            _save(args, one, {of: x for of, x in paths.items() if x.name in written}, beside)


def _save(
    args: argparse.Namespace,
    result: parts.Parts,
    paths: Mapping[str, Path],
    beside: conversations.Beside,
) -> None:
    names, base = _names_of_folder(args), args.model
    for path in (paths[name] for name in MODEL if name in paths):
        models.save(path, result.params, names=names or "official", source=args.model)
        base = str(path)
        if names:
            beside.write(path, tokenizer=True)
    if ADAPTER in paths:
        of_adapter = "hf" if hasattr(result.params.blocks[0].att, "r_k") else "official"
        finetuning.save_adapter(paths[ADAPTER], result.adapter, names=of_adapter, base=base)
        beside.write(paths[ADAPTER], tokenizer=False)
    if STATES in paths:
        models.save_state(paths[STATES], result.initial_state(1, "float32"))


def _model(args: argparse.Namespace) -> str:
    """The model that a run writes, or that of --model if it writes none."""
    found = [name for name in results(args) if name in MODEL]
    return str(args.out / found[0]) if found else args.model


def command(args: argparse.Namespace, vocabulary: int, tokenizer: str | None) -> list[str]:
    """The command line that writes text with the results, but for the prompt. `tokenizer` is the
    name of the one of the data."""
    written = results(args)
    model = _model(args)
    line = ["rwkv-jax", "generate", model]
    if ADAPTER in written:
        line += ["--adapter", str(args.out / ADAPTER)]
    if STATES in written:
        line += ["--initial-state", str(args.out / STATES)]
    in_folder = _names_of_folder(args) is not None
    if in_folder and conversations.beside(args).tokenizer:
        return line
    usual = None
    with contextlib.suppress(ValueError):
        # A folder has the tokenizer of the one that it is made of.
        checkpoint = args.model if in_folder else model
        usual = tokenizers.for_vocabulary(vocabulary, checkpoint=checkpoint)
    return line if tokenizer in (None, usual) else [*line, "--tokenizer", tokenizer]
