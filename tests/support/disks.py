"""Disks that are full."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """To write more bytes of a file fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
