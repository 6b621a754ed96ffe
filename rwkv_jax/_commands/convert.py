"""`rwkv-jax convert`: a checkpoint in another form."""

import argparse

from rwkv_jax import _files
from rwkv_jax._commands.arguments import add_dtype, add_model, positive
from rwkv_jax._commands.output import check_target, in_bytes, refuse_existing

HELP = (
    "Write a model as a .pth file, as a .safetensors file, or as a folder of Hugging Face or for "
    "flash-linear-attention. A folder also gets the files of the tokenizer in the folder SOURCE."
)
EXAMPLES = (
    "convert model.pth model.safetensors",
    "convert folder-of-hugging-face model.pth --dtype bfloat16",
    "convert model.pth folder --names hf",
    "convert model.pth small.safetensors --quantize int8",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "source")
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="a .pth or .safetensors file; with --names hf or fla a folder",
    )
    add_dtype(parser, "dtype of the parameters (default: that of each in SOURCE)")
    parser.add_argument(
        "--names",
        choices=("official", "hf", "fla"),
        default="official",
        help="names and layout of RWKV-LM, of RWKV-7 on Hugging Face or of flash-linear-attention "
        "(default: official)",
    )
    parser.add_argument(
        "--quantize",
        choices=("int8",),
        help="make the matrices of linear maps and of the head int8; TARGET is a .safetensors file",
    )
    parser.add_argument(
        "--group",
        type=positive,
        help="inputs that share a factor, with --quantize (default: all of an output)",
    )
    parser.add_argument("--force", action="store_true", help="replace TARGET if it exists")


def run(arguments: argparse.Namespace) -> int:
    target = _files.expanded(arguments.target)
    if arguments.group and not arguments.quantize:
        raise ValueError("--group needs --quantize")
    refuse_existing(target, arguments.force)

    import jax

    from rwkv_jax import models
    from rwkv_jax.models._checkpoints.saving import endings_for

    form = models.inspect(arguments.source)
    quantised = arguments.quantize is not None
    endings = endings_for("--names", form.params, arguments.names, quantised=quantised)
    check_target("TARGET", arguments.target, endings)
    # The memory of a GPU or TPU may be too small, and nothing is computed.
    with jax.default_device(jax.devices("cpu")[0]):
        params = models.load(
            arguments.source, dtype=arguments.dtype, quantize=quantised, group=arguments.group
        ).params
        models.save(target, params, names=arguments.names, source=arguments.source)
    count = sum(x.size for x in jax.tree.leaves(form.params))
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(f"{target}: {form.generation}, {count:,} parameters, {in_bytes(size)}")
    return 0
