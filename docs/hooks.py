"""What MkDocs does to pages beside Markdown: maths becomes MathML, which browsers show without a
script, and the page about contributing begins with CONTRIBUTING.md."""

import html
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[1]
MATHS = re.compile(r'<(div|span) class="arithmatex">\\[\[(](.*?)\\[\])]</\1>', re.DOTALL)
INCLUDED = "<!-- CONTRIBUTING.md -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    if INCLUDED not in markdown:
        return markdown
    # Links of the file start at the root of the repository, links of a page at its folder.
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("](docs/pages/", "](")
    return markdown.replace(INCLUDED, text)


def on_page_content(html: str, **_: Any) -> str:
    return MATHS.sub(_mathml, html)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    return convert(html.unescape(found[2].strip()), display=display)
