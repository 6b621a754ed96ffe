"""The annotations of the package, which tests check at run time."""

from typing import Any

import beartype


def checked(function: Any) -> Any:
    """Those of functions of a module or a class. A function inside another one would be decorated
    again with each call."""
    return function if "<locals>" in function.__qualname__ else beartype.beartype(function)
