"""The checks that the sizes of a model of any generation pass."""

from collections.abc import Mapping


def check_sizes(generation: str, sizes: Mapping[str, int]) -> None:
    """Raise a `ValueError` that names the generation unless each size is positive, and `width` a
    multiple of `head_size`, if there is one."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{generation}: {name} is {size}; accepted is a positive integer")
    width, head_size = sizes["width"], sizes.get("head_size", 1)
    if width % head_size:
        raise ValueError(
            f"{generation}: width is {width}; accepted is a multiple of head_size = {head_size}"
        )
