"""The data: bytes of files, cut into sequences, and n-gram models of them to compare with."""

import argparse
import sys
import sysconfig
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

NOT_OURS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
"""Folders whose files are left out, because they are not sources of the library itself."""

HELD_OUT_EVERY = 20
"""One file of so many is held out."""


class Batch(NamedTuple):
    """Rows of a batch, as JAX or numpy arrays.

    Attributes:
      tokens: [B, T + 1]; the model reads all but the last of a row, and predicts all but the first.
      mask: [B, T], which predictions count; all of them if None.
      segment_ids: [B, T], which tokens that the model reads are one document, with 0 for padding;
        a row is one document if None.
    """

    tokens: jax.Array | np.ndarray
    mask: jax.Array | np.ndarray | None = None
    segment_ids: jax.Array | np.ndarray | None = None


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
    def checksum(self) -> int | None:
        """A number that tells files apart, or None where no files are read."""
        ...

    @property
    def tokens(self) -> int | None:
        """How many tokens there are to train on, or None without an end."""
        ...

    def batch(self, step: int) -> Batch:
        """The rows of a step, from 0 on."""
        ...


class Text:
    """The files that the options ask for."""

    def __init__(self, args: argparse.Namespace):
        self._seed, self._batch, self._context = args.seed, args.batch, args.context
        self._text, held_out = (
            check_size(part, args.context) for part in read(args.data, args.pattern)
        )
        count = max(1, min(args.eval_bytes, len(held_out)) // args.context)
        rows = evenly_spaced(held_out, count=count, context=args.context)
        self.held_out = Batch(rows)
        self.ngrams = ngram_losses(self._text, rows)
        self.checksum = zlib.crc32(self._text.tobytes())
        self.tokens = len(self._text)

    def __str__(self) -> str:
        held_out = self.held_out.tokens[:, 1:].size
        return f"{len(self._text):,} bytes to train on, {held_out:,} held-out bytes to predict"

    def batch(self, step: int) -> Batch:
        """Sequences that depend on the seed and the step alone."""
        return Batch(
            batch_at(step, self._text, seed=self._seed, batch=self._batch, context=self._context)
        )


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
        paths = sorted(path.relative_to(folder) for path in folder.rglob(pattern) if path.is_file())
        files = [(folder / path).read_bytes() for path in paths if NOT_OURS.isdisjoint(path.parts)]
    except (OSError, ValueError, NotImplementedError) as error:  # of a file or of the pattern
        sys.exit(f"--data {folder} --pattern {pattern!r} cannot be read: {error}")
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    del files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    if not held_out:
        sys.exit(
            f"{folder} has {len(files)} files {pattern}; needed are {HELD_OUT_EVERY} or one file"
        )
    train, test = (np.frombuffer(b"\n".join(part), np.uint8) for part in (files, held_out))
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
