"""`rwkv-jax average`: tuned states of several files as one."""

import argparse

from rwkv_jax import _files
from rwkv_jax._commands.output import check_target, refuse_existing

HELP = "Write the weighted average of states that state tuning has made."
EXAMPLES = (
    "average mean.pth first.pth second.pth",
    "average mixed.pth poems.pth=3 letters.pth=1",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="OUT", help="a .pth or .safetensors file")
    parser.add_argument(
        "states",
        nargs="+",
        metavar="FILE[=WEIGHT]",
        help="files of tuned states of one model, as --initial-state takes them, and how much each "
        "of them counts (default: 1)",
    )
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def run(arguments: argparse.Namespace) -> int:
    target = _files.expanded(arguments.target)
    refuse_existing(target, arguments.force)

    import jax
    import jax.numpy as jnp
    import numpy as np

    from rwkv_jax import finetuning
    from rwkv_jax.models._checkpoints import loading, saving, writing

    check_target("OUT", arguments.target, writing.ENDINGS)
    given = [_files.weighted("FILE", text) for text in arguments.states]
    with jax.default_device(jax.devices("cpu")[0]):
        states = []
        for path, _ in given:
            if not (found := loading.tuned_states(path)):
                raise ValueError(f"{path}: the file has no tuned states")
            states.append({n: jnp.asarray(np.array(x.array, np.float32)) for n, x in found.items()})
        mean = finetuning.average(states, [weight for _, weight in given])
        saving.save_tuned(target, mean)
    print(f"{target}: {len(mean)} states of {len(given)} files")
    return 0
