"""The files beside a model in its folder that text needs: its tokenizer and its format of
conversations."""

import contextlib
import shutil
from pathlib import Path

from rwkv_jax.models._checkpoints import config
from rwkv_jax.models._checkpoints.writing import replacing
from rwkv_jax.tokenizers._world import FILE, VOCABULARY
from rwkv_jax.tokenizers._writing import world_files

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    FILE,
    "chat_template.jinja",
    "generation_config.json",
)


def is_folder_of_model(path: Path) -> bool:
    """Whether a checkpoint is a folder that has more than tensors."""
    return path.is_dir() and any((path / name).is_file() for name in (config.FILE, *NAMES))


def copy(source: Path, folder: Path) -> None:
    """Copy the files in a folder, if it is one and another one, to the folder of a model."""
    if not source.is_dir() or folder.samefile(source):
        return
    for name in NAMES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def remove(folder: Path) -> None:
    """Remove the files from a folder."""
    for name in NAMES:
        (folder / name).unlink(missing_ok=True)


def add_tokenizer(folder: Path, vocabulary: int) -> None:
    """Write the tokenizer that a vocabulary of this size has, if it is that of the World models, a
    package with it is installed, and the folder has none."""
    known = (folder / name for name in ("tokenizer.json", FILE))
    if vocabulary == VOCABULARY and not any(x.is_file() for x in known):
        with contextlib.suppress(ImportError):
            for name, content in world_files().items():
                with replacing(folder / name) as file:
                    file.write(content)
