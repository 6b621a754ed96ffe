"""Documents of files, packed into rows."""

import argparse
import contextlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rwkv_jax import _files, data, tokenizers
from rwkv_jax._training.data import Batch
from rwkv_jax._training.sources import Opener, numbers, split
from rwkv_jax.data import Source
from rwkv_jax.tokenizers import Tokenizer

_FEW = 20
"""Fewer documents than so many are in memory if their files are small, to be shuffled in parts."""

_SHOWN = 8
"""How many documents of a batch a message names."""


class Documents:
    """What train.py trains on with --data: documents of files, which are packed into rows.

    Attributes:
      held_out: rows of documents that are held out, or of those of --validation.
      efficiency: which share of the places of all rows so far has a prediction that counts, or None
        before the first row.
    """

    ngrams: Mapping[str, float] = {}

    def __init__(self, args: argparse.Namespace, vocabulary: int, *, packed: bool):
        given = [_files.weighted("--data", text) for text in args.data]
        weights = [weight for _, weight in given]
        share, validation = _validation(args.validation)
        self.tokenizer = _tokenizer(args, vocabulary)
        few = max(_FEW, round(1 / share)) if share else _FEW
        open_ = Opener(args, vocabulary, self.tokenizer, few)
        found = [open_(path) for path, _ in given]
        sources: Sequence[Any] = found
        if validation is None:
            sources, held_out = zip(*(split(x, share) for x in found), strict=True)
        else:
            held_out = [open_(validation)]
            found = found + held_out
        self._sources = sources
        sized = [x for x in sources if isinstance(x, data.SizedSource)]
        self.tokens = sum(int(x.sizes.sum()) for x in sized) if len(sized) == len(sources) else None
        self._options = {"context": args.context, "packed": packed}
        self.held_out = self._rows(held_out, max(1, args.eval_tokens // args.context))
        self._order = {"batch": args.batch, "seed": args.seed, "weights": weights}
        self._batches = self._made_of(sources)
        self._positions: dict[int, Any] = {0: self._batches.get_state()}
        self._places = self._counted = 0
        self.checksums = [[len(x), *x.checksums()] for x in found]
        self.checksums.append([zlib.crc32(repr(weights).encode())])

    def __str__(self) -> str:
        held_out = np.count_nonzero(np.asarray(self.held_out.mask))
        documents = sum(map(len, self._sources))
        return f"{documents:,} documents to train on, {held_out:,} held-out tokens to predict"

    @property
    def efficiency(self) -> float | None:
        return self._counted / self._places if self._places else None

    def batch(self, step: int) -> Batch:
        made = next(self._batches)
        self._places += made.mask.size
        self._counted += int(made.mask.sum())
        self._positions[step + 1] = self._batches.get_state()
        self._positions.pop(step - 7, None)
        return Batch(made.tokens, made.targets, made.mask, made.segment_ids)

    def position(self, step: int) -> Any:
        return self._positions[step]

    def resume(self, step: int, position: Any) -> None:
        self._batches.set_state(position)
        self._positions[step] = position

    def places(self, step: int) -> str:
        """Where the documents of the batch of a step are, which is one of the last seven."""
        firsts = np.cumsum([0, *map(len, self._sources)])
        numbered = [numbers(x, int(i)) for x, i in zip(self._sources, firsts[:-1], strict=True)]
        with contextlib.closing(self._made_of(numbered)) as batches:
            batches.set_state(self._positions[step])
            batch = next(batches)
        found = np.unique(batch.tokens[batch.segment_ids > 0])
        shown = []
        for number in map(int, found[:_SHOWN]):
            i = int(np.searchsorted(firsts, number, side="right")) - 1
            shown.append(self._sources[i].place(number - int(firsts[i])))
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f"{', '.join(shown)}{more}"

    def close(self) -> None:
        """End the threads that make batches."""
        self._batches.close()

    def _made_of(self, sources: Sequence[Source]) -> data.Batches:
        return data.training_batches([*sources], **self._order, **self._options)

    def _rows(self, sources: Sequence[Source], rows: int) -> Batch:
        """The first rows of the documents of all sources, about so many."""
        each = -(-rows // len(sources))
        found = []
        for source in sources:
            batches = data.validation_batches([source], batch=each, **self._options)
            first = next(batches)
            batches.close()
            used = first.mask.any(axis=1)
            found.append([x[used] for x in first])
        return Batch(*(np.concatenate(x) for x in zip(*found, strict=True)))


def _validation(given: str) -> tuple[float, Path | None]:
    """The share of the documents that is held out, or a file of others."""
    try:
        share = float(given)
    except ValueError:
        return 0.0, _files.expanded(given)
    if not 0 < share <= 0.5:
        raise ValueError(
            f"--validation is {given}; accepted are a share above 0 and up to 0.5, and a file"
        )
    return share, None


def _tokenizer(args: argparse.Namespace, vocabulary: int) -> Tokenizer | None:
    """The tokenizer of the model, or None if it is not known, as for files of tokens."""
    name = args.tokenizer
    if name is None and args.model is None:
        name = "bytes"
    if name is None:
        try:
            name = tokenizers.for_vocabulary(vocabulary, checkpoint=args.model)
        except ValueError:
            return None
    return tokenizers.load(name, vocabulary)
