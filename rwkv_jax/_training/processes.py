"""What the first of several processes decides for all of them."""

from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils


def by_first(work: Callable[[], int]) -> int:
    """What `work` returns in the first process, a number from 0 on. The other processes do not call
    it. Where it exits, all processes exit."""
    if jax.process_count() == 1:
        return work()
    result, end = -1, SystemExit("the first process has ended with an error")
    if jax.process_index() == 0:
        try:
            result = work()
        except SystemExit as error:
            end = error
    result = int(multihost_utils.broadcast_one_to_all(np.int32(result)))
    if result < 0:
        raise end
    return result
