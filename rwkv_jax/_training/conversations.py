"""How conversations become text and tokens, and the files beside results that say so."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rwkv_jax import _files
from rwkv_jax.chat import G1, Template, template_in
from rwkv_jax.chat._template import FILE, source_of
from rwkv_jax.chat._tools import read_tools
from rwkv_jax.tokenizers._world import FILE as VOCABULARY_FILE

_TOKENIZERS = {".json": "tokenizer.json", ".txt": VOCABULARY_FILE}
"""The files of tokenizers in the folder of a model, by the endings of --tokenizer."""


def template(args: argparse.Namespace) -> Path | None:
    """The template of --template or, without this option, that beside --adapter. None if there is
    none."""
    if args.template is None and args.adapter is not None:
        return template_in(args.adapter)
    return None if args.template in (None, "none") else _files.expanded(args.template)


def form(args: argparse.Namespace) -> G1 | Template:
    """How conversations become text."""
    path = template(args)
    if path is None and args.template is None and args.model is not None:
        path = template_in(args.model)
    tools = [] if args.tools is None else read_tools(args.tools)
    return G1(tools=tools) if path is None else Template(path, tools=tools)


class Beside(NamedTuple):
    """What belongs beside results, by the names of files. It is read before a file that an earlier
    run has written is replaced, which may be one of these.

    Attributes:
      template: the template that is not that of --model.
      tokenizer: the file of --tokenizer.
      plain: whether the format is that of the G1 models whatever is beside --model.
    """

    template: Mapping[str, bytes]
    tokenizer: Mapping[str, bytes]
    plain: bool

    def write(self, folder: Path, *, tokenizer: bool) -> None:
        """Write the template, for `rwkv-jax chat`, and perhaps the tokenizer to a folder."""
        if self.plain:
            (folder / FILE).unlink(missing_ok=True)
            if (path := template_in(folder)) is not None:
                without = {**json.loads(path.read_bytes()), "chat_template": None}
                path.write_text(json.dumps(without, indent=2))
        if tokenizer and self.tokenizer:
            for name in _TOKENIZERS.values():
                (folder / name).unlink(missing_ok=True)
        for name, content in {**self.template, **(self.tokenizer if tokenizer else {})}.items():
            (folder / name).write_bytes(content)


def beside(args: argparse.Namespace) -> Beside:
    """What belongs beside the results of a run."""
    path, tokenizer = template(args), Path(args.tokenizer or "")
    name = _TOKENIZERS.get(tokenizer.suffix)
    return Beside(
        {} if path is None else {FILE: source_of(path).encode()},
        {} if name is None else {name: _files.expanded(tokenizer).read_bytes()},
        args.template == "none",
    )
