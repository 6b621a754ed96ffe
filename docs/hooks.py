"""What MkDocs does besides Markdown: notebooks are executed and become pages, the output of the
benchmarks is copied, maths becomes MathML, which browsers show without a script, and the page about
contributing begins with CONTRIBUTING.md."""

import contextlib
import html
import io
import json
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
MATHS = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
INCLUDED = "<!-- CONTRIBUTING.md -->"
SOURCE = "https://github.com/rwkv-jax/rwkv_jax/blob/main/docs/notebooks"
# In the repository these folders lie beside that of the pages, and on the site in it.
MOVED = [
    (re.compile(r"\]\(\.\./benchmarks/"), "](benchmarks/"),
    (re.compile(r"\]\(\.\./notebooks/([\w-]+)\.ipynb"), r"](notebooks/\1.md"),
]


def on_files(files: Files, config: Any) -> Files:
    for path in (DOCS / "notebooks").glob("*.ipynb"):
        name = f"notebooks/{path.stem}.md"
        files.append(File.generated(config, name, content=_executed(path)))
    for path in (DOCS / "benchmarks").rglob("*.txt"):
        name = path.relative_to(DOCS).as_posix()
        files.append(File(name, str(DOCS), config.site_dir, use_directory_urls=False))
    return files


def _executed(path: Path) -> str:
    """A notebook as Markdown, each cell followed by what it prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source.replace("](../pages/", "](../"))
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, path.name, "exec"), names)
        parts.append(f"```python\n{source}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue()}```")
    parts.append(f"This page is a [notebook]({SOURCE}/{path.name}), executed on a CPU.")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, **_: Any) -> str:
    for pattern, replacement in MOVED:
        markdown = pattern.sub(replacement, markdown)
    if INCLUDED not in markdown:
        return markdown
    # Links of the file start at the root of the repository, links of a page at its folder.
    text = (DOCS.parent / "CONTRIBUTING.md").read_text().replace("](docs/pages/", "](")
    return markdown.replace(INCLUDED, text)


def on_page_content(html: str, **_: Any) -> str:
    return MATHS.sub(_mathml, html)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[1] == "div" else "inline"
    return convert(html.unescape(match[2].strip()), display=display)
