"""`rwkv-jax merge`: a model with an adapter as a model by itself."""

import argparse

from rwkv_jax import _files
from rwkv_jax._commands.arguments import add_dtype, add_model
from rwkv_jax._commands.output import check_target, in_bytes, refuse_existing

HELP = "Add an adapter of LoRA or DoRA to the matrices of a model and write the result."
EXAMPLES = (
    "merge model.pth adapter merged.pth",
    "merge model.pth adapter merged.safetensors --dtype bfloat16",
    "merge model.pth rwkv-0.pth merged.pth --lora-alpha 16",
    "merge folder-of-hugging-face adapter merged-folder",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument(
        "adapter",
        metavar="ADAPTER",
        help="a folder of PEFT, with adapter_config.json, or a file of RWKV-PEFT",
    )
    parser.add_argument(
        "target",
        metavar="OUT",
        help="a .pth or .safetensors file; or, where MODEL is a folder of Hugging Face or for "
        "flash-linear-attention, such a folder",
    )
    parser.add_argument(
        "--lora-alpha",
        type=float,
        metavar="ALPHA",
        help="the lora_alpha of the training, which a file of RWKV-PEFT does not say",
    )
    add_dtype(parser, "dtype of the parameters (default: that of each in MODEL)")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(arguments: argparse.Namespace) -> int:
    target = _files.expanded(arguments.target)
    refuse_existing(target, arguments.force)

    import jax

    from rwkv_jax import finetuning, models
    from rwkv_jax.models._checkpoints import saving, text_files, writing

    form = models.inspect(arguments.model).params
    in_folder = saving.needs_folder(form) or (
        target.suffix not in writing.ENDINGS
        and text_files.is_folder_of_model(_files.expanded(arguments.model))
    )
    names = (saving.names_of_folder(arguments.model, form) if in_folder else None) or "official"
    check_target("OUT", arguments.target, writing.ENDINGS if names == "official" else ())
    alpha, of_file = arguments.lora_alpha, _files.expanded(arguments.adapter).is_file()
    if of_file != (alpha is not None):
        raise ValueError(
            f"ADAPTER is {arguments.adapter}, and --lora-alpha is {alpha}; accepted is a file of "
            "RWKV-PEFT with --lora-alpha, or a folder of PEFT without, which says it itself"
        )
    # The memory of a GPU or TPU may be too small, and little is computed.
    with jax.default_device(jax.devices("cpu")[0]):
        adapter = None if of_file else finetuning.load_adapter(arguments.adapter, form)
        # Rounded once, after the sum.
        wide = None if arguments.dtype is None else "float32"
        model = models.load(arguments.model, dtype=wide)
        params = model.params
        if adapter is None:
            params, adapter = finetuning.load_rwkv_peft(arguments.adapter, params, alpha=alpha)
        params = finetuning.merge(params, adapter)
        if wide is not None:
            params = jax.tree.map(lambda x: x.astype(arguments.dtype), params)
        models.save(target, params, names=names, source=arguments.model)
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    print(
        f"{target}: {model.generation}, {len(adapter.matrices)} matrices with an adapter, "
        f"{in_bytes(size)}"
    )
    return 0
