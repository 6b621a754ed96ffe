"""What a batch is, and an iterator of them."""

import atexit
import weakref
from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """Rows of documents. A document of n tokens takes n - 1 places, since the last token has
    nothing to predict, and one with more than `context` + 1 takes several parts, each of which
    begins without memory of the one before.

    Attributes:
      tokens: [batch, context] in int32, what the model reads; 0 where there is padding.
      targets: [batch, context] in int32, the token to be predicted at each place.
      mask: [batch, context] in bool, which predictions count. Those at padding do not.
      segment_ids: [batch, context] in int32: 1, 2, ... for the documents of a row, 0 for padding.
    """

    tokens: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    segment_ids: np.ndarray

    @property
    def efficiency(self) -> float:
        """The share of places whose prediction counts."""
        return float(self.mask.mean())

    @property
    def padding(self) -> float:
        """The share of places that are padding."""
        return float((self.segment_ids == 0).mean())


class Batches:
    """An iterator of batches, which threads make ahead.

    `get_state` tells where it is, as numbers and texts in dictionaries and lists, which JSON holds.
    `set_state` continues from there, also in another process: the batches that follow are the same
    if the documents are.
    """

    def __init__(self, iterator: Any, made_of: dict[str, Any]):
        """`iterator` is one of the package grain, and `made_of` what its batches depend on."""
        self._iterator: Any = iterator
        self._made_of = made_of
        _open.add(self)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is: after the last batch that it gave."""
        return {"made_of": self._made_of, "at": self._iterator.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to where `get_state` was called.

        Raises:
          ValueError: the state is of sources with other numbers of documents, or of other
            arguments.
        """
        if state.get("made_of") != self._made_of:
            raise ValueError(
                f"set_state: the state is of {state.get('made_of')}; accepted is one of "
                f"{self._made_of}"
            )
        self._iterator.set_state(state["at"])

    def close(self) -> None:
        """End the threads. There are no more batches then."""
        if hasattr(self._iterator, "close"):
            self._iterator.close()
        self._iterator = iter(())


_open: weakref.WeakSet[Batches] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that still makes batches while Python ends would end the process by an abort."""
    for batches in list(_open):
        batches.close()
