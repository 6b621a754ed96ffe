"""Checkpoints: a record of the options and losses, and a folder with every array by its name."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TypeAlias, TypedDict

import jax
import orbax.checkpoint as ocp
from flax import nnx

RECORD = "checkpoint.json"

Options: TypeAlias = dict[str, str | int | float | None]


class Log(TypedDict):
    """Losses in nats per byte.

    Attributes:
      train: the loss of each step.
      held_out: pairs of a number of steps and the held-out loss after them.
      ngrams: held-out losses of other models, by name.
    """

    train: list[float]
    held_out: list[list[float]]
    ngrams: dict[str, float]


def save(folder: Path, state: dict[str, nnx.Variable], options: Options, log: Log) -> None:
    """Replace the checkpoint in one step: an interruption leaves the old one or the new one.

    The record names the folder of the arrays. New arrays go to a folder that the old record does
    not name.
    """
    path = folder / RECORD
    old = json.loads(path.read_text())["arrays"] if path.is_file() else None
    new = "arrays.1" if old == "arrays.0" else "arrays.0"
    with ocp.StandardCheckpointer() as checkpointer:
        values = {name: x[...] for name, x in state.items()}
        checkpointer.save((folder / new).absolute(), values, force=True)
    if jax.process_index() == 0:
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps({"options": options, "log": log, "arrays": new}))
        os.replace(scratch, path)
        shutil.rmtree(folder / str(old), ignore_errors=True)


def load(folder: Path, state: dict[str, nnx.Variable], options: Options) -> Log:
    """Set each variable, where it is on the mesh, and return the log.

    The program exits where the options of the checkpoint are not `options`.
    """
    path = folder / RECORD
    if not path.is_file():
        sys.exit(f"{path} does not exist; run without --resume first")
    record = json.loads(path.read_text())
    for name, value in options.items():
        if (before := record["options"].get(name)) != value:
            sys.exit(f"{path} was made with {name} {before}, not {value}")
    with ocp.StandardCheckpointer() as checkpointer:
        places = {name: x[...] for name, x in state.items()}
        values = checkpointer.restore((folder / record["arrays"]).absolute(), places)
    for name, x in state.items():
        x[...] = values[name]
    return record["log"]
