"""The commands of `python -m rwkv_jax` as tests run them."""

from typing import Any

import pytest

from rwkv_jax import _commands


class Command:
    """Runs a command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self._capsys = capsys

    def __call__(self, *arguments: object, code: int = 0) -> Any:
        """What a command that ends with `code` has written: `out` and `err`."""
        assert _commands.main(list(map(str, arguments))) == code
        return self._capsys.readouterr()

    def refused(self, *arguments: object) -> str:
        """What the user is told of arguments that a command cannot take."""
        return self(*arguments, code=2).err

    def table(self, *arguments: object) -> dict[str, str]:
        """The rows of what a command says, by name."""
        rows = (line.split("  ", 1) for line in self(*arguments).out.splitlines())
        return {name: value.strip() for name, value in rows}


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)
