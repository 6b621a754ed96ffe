"""Batches and what gives them: for the demo bytes of files, cut into sequences, and n-gram models
of them to compare with."""

import argparse
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from rwkv_jax import tokenizers
from rwkv_jax.tokenizers import Tokenizer

_BEGIN = 2**16
NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
"""Folders whose files are left out, because they are not sources of the library itself."""

HELD_OUT_EVERY = 20
"""One file of so many is held out."""


class Batch(NamedTuple):
    """Rows of a batch, as JAX or numpy arrays [B, T].

    Attributes:
      tokens: what the model reads.
      targets: the token to be predicted at each place.
      mask: which predictions count; all of them if None.
      segment_ids: which tokens are one document, with 0 for padding; a row is one document if None.
    """

    tokens: jax.Array | np.ndarray
    targets: jax.Array | np.ndarray
    mask: jax.Array | np.ndarray | None = None
    segment_ids: jax.Array | np.ndarray | None = None


def windows(rows: jax.Array | np.ndarray) -> Batch:
    """The batch of rows [B, T + 1], of each of which all tokens but the first are predicted."""
    return Batch(rows[:, :-1], rows[:, 1:])


@runtime_checkable
class Source(Protocol):
    """What a model is trained on. `str` describes it."""

    @property
    def held_out(self) -> Batch:
        """Rows to evaluate on."""
        ...

    @property
    def ngrams(self) -> Mapping[str, float]:
        """Losses of other models on the held-out rows, by name."""
        ...

    @property
    def checksums(self) -> Sequence[Sequence[int]]:
        """Numbers that tell data apart, a list for each file or folder. The first number of a list
        is always that of the data, and most of the others are, also where some documents have been
        mended."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """What has made the tokens of text, if it is known."""
        ...

    @property
    def tokens(self) -> int | None:
        """How many tokens there are to train on, or None without an end."""
        ...

    def batch(self, step: int) -> Batch:
        """The rows of a step, from 0 on. Steps come in order, the first one after those of
        `resume`."""
        ...

    def position(self, step: int) -> Any:
        """What `resume` takes, in JSON, to go on after so many steps, which are the last one or the
        one before that `batch` has made."""
        ...

    def places(self, step: int) -> str:
        """Where the documents of the batch of a step are, or "" if that is not known. The step is
        one of the last seven."""
        ...

    def resume(self, step: int, position: Any) -> None:
        """Go on after so many steps."""
        ...

    def close(self) -> None:
        """There are no more batches."""
        ...


class ByStep:
    """What sources of bytes have in common whose batches depend on the step alone."""

    tokenizer = tokenizers.load("bytes")

    def position(self, step: int) -> None:
        return None

    def places(self, step: int) -> str:
        return ""

    def resume(self, step: int, position: None) -> None:
        pass

    def close(self) -> None:
        pass


class StandardLibrary(ByStep):
    """The sources of Python's standard library: sequences at random places, for the demo."""

    def __init__(self, args: argparse.Namespace):
        self._seed, self._batch, self._context = args.seed, args.batch, args.context
        self._text, held_out = (check_size(part, args.context) for part in read(None, args.pattern))
        count = max(1, min(args.eval_tokens, len(held_out)) // args.context)
        rows = evenly_spaced(held_out, count=count, context=args.context)
        self.held_out = windows(rows)
        self.ngrams = ngram_losses(self._text, rows)
        self.checksums = [[zlib.crc32(self._text.tobytes())]]
        self.tokens = len(self._text)

    def __str__(self) -> str:
        held_out = self.held_out.targets.size
        return f"{len(self._text):,} bytes to train on, {held_out:,} held-out bytes to predict"

    def batch(self, step: int) -> Batch:
        """Sequences that depend on the seed and the step alone."""
        return windows(
            batch_at(step, self._text, seed=self._seed, batch=self._batch, context=self._context)
        )


def files(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern in a folder, but for tests and packages of others."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [x for x in folders if x not in NOT_OURS]
        found += [path for name in names if (path := Path(place, name)).match(pattern)]
    return sorted(path for path in found if path.is_file())


def checksum_of(paths: Iterable[Path]) -> int:
    """A checksum of the sizes of files and of how they begin, which reads no large file whole."""
    total = 0
    for path in paths:
        with path.open("rb") as file:
            total = zlib.crc32(
                file.read(_BEGIN), zlib.crc32(str(path.stat().st_size).encode(), total)
            )
    return total


def read(data: Path | None, pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and held-out bytes: every twentieth file is held out, or the end of a single file.

    `data` is a file, a folder, or None for the standard library of Python. In a folder `pattern`
    says which files are read."""
    folder = data or Path(sysconfig.get_path("stdlib"))
    try:
        if not folder.is_dir():
            text = np.frombuffer(folder.read_bytes(), np.uint8)
            cut = len(text) - len(text) // HELD_OUT_EVERY
            return text[:cut], text[cut:]
        contents = [path.read_bytes() for path in files(folder, pattern)]
    except OSError as error:
        sys.exit(f"--data {folder} --pattern {pattern!r} cannot be read: {error}")
    held_out = contents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del contents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        sys.exit(
            f"{folder} has {len(contents)} files {pattern}; needed are {HELD_OUT_EVERY} or one file"
        )
    train, test = (np.frombuffer(b"\n".join(part), np.uint8) for part in (contents, held_out))
    return train, test


def check_size(text: np.ndarray, context: int) -> np.ndarray:
    """`text`, if it has more bytes than a sequence."""
    if len(text) <= context:
        sys.exit(f"there are {len(text)} bytes; needed are more than the context, {context}")
    return text


def batch_at(step: int, text: np.ndarray, *, seed: int, batch: int, context: int) -> np.ndarray:
    """Sequences [batch, context + 1] that depend on the seed and the step alone."""
    starts = np.random.default_rng((seed, step)).integers(len(text) - context, size=batch)
    return _windows(text, starts, context)


def evenly_spaced(text: np.ndarray, *, count: int, context: int) -> np.ndarray:
    """`count` sequences, [count, context + 1], from the whole of `text`."""
    starts = np.linspace(0, len(text) - context - 1, count)
    return _windows(text, starts.astype(int), context)


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def ngram_losses(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Losses of a unigram and a bigram model on all but the first byte of each row of `held_out`,
    which are the bytes that the language model predicts. The losses are in nats per byte.

    Both models count the bytes of `train`. The unigram model adds one to each count, and the bigram
    model adds the probabilities of the unigram model.
    """
    before, after = held_out[:, :-1], held_out[:, 1:]
    pairs = np.bincount(train[:-1].astype(np.int32) * 256 + train[1:], minlength=65536)
    pairs = pairs.reshape(256, 256)
    unigram = (np.bincount(train, minlength=256) + 1) / (len(train) + 256)
    bigram = (pairs + unigram) / (pairs.sum(1, keepdims=True) + 1)
    return {
        "unigram": float(-np.log(unigram[after]).mean()),
        "bigram": float(-np.log(bigram[before, after]).mean()),
    }
