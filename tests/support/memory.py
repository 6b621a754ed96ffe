"""The bytes of arrays while a function runs."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import jax

import rwkv_jax

T = TypeVar("T")

_PACKAGE = str(Path(rwkv_jax.__file__).parent)


def peak(function: Callable[[], T]) -> tuple[T, int]:
    """What a function returns, and the most bytes of arrays that it has made and holds whenever a
    function of the package returns."""
    before = {id(x): x for x in jax.live_arrays()}
    most = 0

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal most
        if event == "return" and frame.f_code.co_filename.startswith(_PACKAGE):
            new = (x for x in jax.live_arrays() if id(x) not in before)
            most = max(most, sum(x.nbytes for x in new))

    sys.setprofile(look)
    try:
        return function(), most
    finally:
        sys.setprofile(None)
