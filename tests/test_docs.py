"""The README and the pages of the documentation: examples run, links lead somewhere, and shell
commands name scripts and options that exist."""

import os
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs" / "pages").rglob("*.md")])

EXAMPLES = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINKS = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADINGS = re.compile(r"^#+ +(.+)$", re.MULTILINE)
COMMANDS = re.compile(r"(?:python|bash) scripts/[^`#\n]*")
NUMBERS = re.compile(r"\d[\d.,e-]*\b")

pytestmark = pytest.mark.skipif(not FILES, reason="installed without its documentation")


def anchors(file: Path) -> set[str]:
    """The anchors of the headings, as GitHub and MkDocs both make them."""
    headings = HEADINGS.findall(BLOCKS.sub("", file.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "file", [f for f in FILES if EXAMPLES.search(f.read_text())], ids=lambda file: file.name
)
def test_examples_run(file: Path) -> None:
    """One after another, as a reader of the page runs them."""
    text, names = file.read_text(), {}
    for block in EXAMPLES.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(file), "exec"), names)


def links_of(file: Path) -> list[str]:
    """The links to pages and headings of this repository."""
    links = LINKS.findall(BLOCKS.sub("", file.read_text()))
    return [x for x in links if not x.startswith(("https://", "http://", "mailto:"))]


@pytest.mark.parametrize("file", [f for f in FILES if links_of(f)], ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for link in links_of(file):
        path, _, anchor = link.partition("#")
        target = file.parent / path if path else file
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors(target), f"{link}: {target} has no such heading"


def commands() -> Iterator[tuple[str, list[str]]]:
    """The script and the options of each command."""
    for file in FILES:
        for command in COMMANDS.findall(file.read_text()):
            _, script, *words = shlex.split(command)
            yield script, [word.partition("=")[0] for word in words if word.startswith("--")]


def test_there_is_something_to_check() -> None:
    """An expression that matches nothing would leave the other tests without cases."""
    assert any(EXAMPLES.search(file.read_text()) for file in FILES)
    assert any(map(links_of, FILES))
    assert any(options for _, options in commands())


@pytest.mark.parametrize("script", sorted({script for script, _ in commands()}))
def test_commands_exist(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell script takes what pytest or another script takes, so only its name is checked."""
    assert (ROOT / script).is_file()
    if not script.endswith(".py"):
        return
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # train.py adds to it
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(ROOT / script))["main"](["--help"])
    accepted = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for other, options in commands():
        assert other != script or set(options) <= accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", ["implementations", "axes"])
def test_tables_of_what_is_supported(name: str) -> None:
    """The tables are what scripts/support_matrix.py writes. test_native_modules.py has the one of
    CUDA kernels."""
    script = runpy.run_path(str(ROOT / "scripts" / "support_matrix.py"))
    page = ROOT / "docs" / "pages" / script["PAGES"][name]
    table = script[f"{name}_table"]()
    assert script["with_table"](page.read_text(), name, table) == page.read_text()


def test_tables_on_paper() -> None:
    """The page has the output of each command of scripts/scaling.py below the command."""
    script = runpy.run_path(str(ROOT / "scripts" / "scaling.py"))
    page = (ROOT / "docs" / "pages" / "devices.md").read_text()
    commands = re.findall(r"^(python scripts/scaling\.py(.*)\n```\n\n)", page, re.MULTILINE)
    assert len(commands) == 2
    for command, options in commands:
        assert command + script["table"](script["parse"](options.split())) in page


def test_figures_are_in_the_linked_files() -> None:
    """Every number in a table about performance is in a file that its section links."""
    page = ROOT / "docs" / "pages" / "performance.md"
    for section in page.read_text().split("\n## ")[1:]:
        files = [page.parent / link for link in LINKS.findall(section) if "/benchmarks/" in link]
        known = set(NUMBERS.findall(" ".join(file.read_text() for file in files)))
        tables = [line.split("|")[2:] for line in section.splitlines() if line.startswith("| ")]
        assert tables
        for cells in tables[1:]:
            assert set(NUMBERS.findall(LINKS.sub("", " ".join(cells)))) <= known, cells
