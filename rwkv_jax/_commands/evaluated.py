"""The model that `rwkv-jax eval` measures, and how it prints figures."""

import argparse
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rwkv_jax._commands.arguments import tokenizer_of, with_adapter

T = TypeVar("T")


class Evaluated:
    """The model and the tokenizer of a command line. The parameters are loaded by `run`, after the
    texts are known to be right.

    Raises:
      OSError, ValueError, ImportError: the model or the tokenizer cannot be loaded.
    """

    def __init__(self, arguments: argparse.Namespace):
        from rwkv_jax import models

        self._arguments, self._form = arguments, models.inspect(arguments.model)
        self.tokenizer = tokenizer_of(arguments, self._form.config.vocab_size)

    def run(self, measure: Callable[..., T], *operands: Any, tokens: int | None, **more: Any) -> T:
        """What a function of `rwkv_jax.evaluation` gives, with a progress bar of so many tokens."""
        try:
            from tqdm import tqdm
        except ImportError as error:
            raise ImportError(
                "the package tqdm is missing: pip install 'rwkv-jax[text]'"
            ) from error

        from rwkv_jax import models

        arguments, dtype = self._arguments, self._arguments.dtype
        params, state = models.load(arguments.model, dtype=dtype).params, None
        params = with_adapter(arguments, params)
        if arguments.initial_state is not None:
            state = models.load_state(arguments.initial_state, params, dtype=dtype)
        with tqdm(total=tokens, unit=" tokens", disable=None) as bar:
            return measure(
                *(self._form.module, params, *operands),
                state=state,
                batch=arguments.batch,
                dtype=dtype,
                progress=bar.update,
                **more,
            )

    def figures(self, name: str, value: Any) -> dict[str, Any]:
        """What was measured: the model, and the argument `name` of the command."""
        arguments = self._arguments
        found = {"model": arguments.model, "generation": self._form.generation, name: value}
        return found | {"tokenizer": self.tokenizer.name, "dtype": arguments.dtype}


def rows_of(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures for a reader."""
    return [
        (name.replace("_", " "), f"{x:.5g}" if isinstance(x, float) else f"{x}")
        for name, x in figures.items()
    ]


def print_json(figures: Mapping[str, Any]) -> None:
    """Figures for a program. Those that are infinite or NaN are null."""
    # The figures of tasks may be numbers of numpy.
    print(json.dumps(_finite(figures), allow_nan=False, default=lambda x: x.item()))


def _finite(x: Any) -> Any:
    if isinstance(x, Mapping):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
