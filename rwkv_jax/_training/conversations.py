"""How the conversations that a model is trained on become text, and the files that say it."""

import argparse
import json
from pathlib import Path

from rwkv_jax import _files
from rwkv_jax.chat import G1, Template, template_in
from rwkv_jax.chat._template import FILE, source_of
from rwkv_jax.chat._tools import read_tools


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


def write(args: argparse.Namespace, folder: Path) -> None:
    """Put the template that is not that of --model beside a result, or take away that of --model if
    the format is that of the G1 models, for `rwkv-jax chat`."""
    if (path := template(args)) is not None:
        (folder / FILE).write_text(source_of(path), encoding="utf-8")
    elif args.template == "none":
        (folder / FILE).unlink(missing_ok=True)
        if (path := template_in(folder)) is not None:
            without = {**json.loads(path.read_bytes()), "chat_template": None}
            path.write_text(json.dumps(without, indent=2))
