"""The checks that the sizes of a model of any generation pass."""

from collections.abc import Mapping

from rwkv_jax._operator import check


def check_sizes(generation: str, sizes: Mapping[str, int]) -> None:
    """Raise an error that names the generation unless each size is a positive integer, and
    `hidden_size` a multiple of `head_size`, if there is one."""
    for name, size in sizes.items():
        check.number(generation, name, size, 1)
    hidden_size, head_size = sizes["hidden_size"], sizes.get("head_size", 1)
    if hidden_size % head_size:
        raise ValueError(
            f"{generation}: hidden_size is {hidden_size}; accepted is a multiple of head_size = "
            f"{head_size}"
        )
