"""Work in threads, such as what a loop needs next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T]) -> Future[T]:
    """The result of `work`, which a new thread computes."""
    pool = ThreadPoolExecutor(1)
    found = pool.submit(work)
    pool.shutdown(wait=False)
    return found


class Ahead(Generic[T]):
    """Its `take` returns `make(i)` for each i of `numbers` in turn, and then None. A thread makes
    the one after it, until `close`.

    Attributes:
      number: the i of what `take` returns next.
    """

    def __init__(self, make: Callable[[int], T], numbers: range):
        self._make, self._end = make, numbers.stop
        self._pool = ThreadPoolExecutor(1)
        self._submit(numbers.start)

    def _submit(self, number: int) -> None:
        self.number = number
        self._next: Future[T] | None = None
        if number < self._end:
            self._next = self._pool.submit(self._make, number)

    def take(self) -> T | None:
        if self._next is None:
            return None
        made = self._next.result()
        self._submit(self.number + 1)
        return made

    def close(self) -> None:
        self._pool.shutdown()
