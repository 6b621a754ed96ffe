"""Train the same RWKV-7 model on the same batches with RWKV-LM's training code and with rwkv_jax,
and compare the losses of each step.

    python scripts/compare_official.py DIR                 # a checkout of RWKV-LM; needs a GPU
    python scripts/compare_official.py DIR --dtypes bfloat16 float32 --json losses.json
    python scripts/compare_official.py DIR --official-dtype float32
    python scripts/compare_official.py DIR --tokenizer world

Both start from the initial weights of rwkv_jax, rounded to bfloat16, and read the sources of the
standard library of Python in the order of train.py, as bytes or as tokens of a tokenizer. Both have
bfloat16 activations, float32 copies of the parameters in AdamW, the L2 wrap, clipping, and the
learning rates and the weight decay of the official code. rwkv_jax has the model and the optimizer
of train.py. More trainings show how much of a difference is rounding: with --dtypes rwkv_jax trains
in other dtypes of the activations as well, with --plain without the native kernels of
rwkv_jax.layers, with --rounded with all vectors rounded to bfloat16, as the official code has them,
and with --again the official code trains once more with the older of its kernels for wkv7.

With bfloat16 two trainings of the official code differ from each other. With --official-dtype
float32 both codes train in float32 without TF32, and the official code has formulas in PyTorch in
place of its kernels, which take bfloat16 alone, and its older kernel for wkv7 in float32.

Exits with 1 where a loss of the first of these dtypes differs by more than --tolerance from that of
the official code.
"""

import argparse
import functools
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarking import official
from benchmarking.model_step import Row, initial_state, make_optimizer, training_step
from benchmarking.official import Hyperparameters
from benchmarking.processes import apart
from benchmarking.report import Table
from rwkv_jax import tokenizers
from rwkv_jax._training import data
from rwkv_jax.models import Kernels, rwkv7

L2_WRAP = 1e-4
OFFICIAL = "official"
OLDER_KERNEL = ""
"""The value of the official option `kernel` for the kernel that it had before "@rwkv3"."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compare losses with RWKV-LM's training code.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("official", type=Path, metavar="DIR", help="a checkout of RWKV-LM")
    add("--layers", type=int, default=6, help="number of layers")
    add("--width", type=int, default=512, help="width of the model")
    add("--batch", type=int, default=16, help="sequences in each step")
    add("--context", type=int, default=512, help="tokens in each sequence, a multiple of 16")
    add("--steps", type=int, default=200, help="steps of training")
    add("--learning-rate", type=float, default=6e-4, help="learning rate at its peak")
    add("--warmup", type=int, default=10, help="steps until the peak of the learning rate")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices")
    add("--tokenizer", default="bytes", help="tokenizer, as rwkv_jax.tokenizers.load takes it")
    add("--seed", type=int, default=0, help="seed of the weights and of the batches")
    add(
        "--dtypes",
        nargs="+",
        help="dtypes of the activations of rwkv_jax; that of the official code if not given",
    )
    add(
        "--official-dtype",
        choices=official.DTYPES,
        default="bfloat16",
        help="dtype of the official code",
    )
    add("--plain", action="store_true", help="train with layer functions in plain JAX, too")
    add("--rounded", action="store_true", help="train with vectors in bfloat16, too")
    add("--again", action="store_true", help="train with the older official kernel, too")
    add("--implementation", help="implementation of wkv7; the best one if not given")
    add("--every", type=int, default=10, help="steps between the rows of the table")
    add("--tolerance", type=float, default=0.01, help="largest difference that is accepted")
    add("--json", type=Path, help="write all losses to this file")
    args = parser.parse_args(argv)
    if args.dtypes is None:
        args.dtypes = [args.official_dtype]
    if args.again and args.official_dtype != "bfloat16":
        parser.error("--again needs bfloat16, which the kernels of the official code take")
    if min(args.layers, args.width, args.batch, args.steps, args.every) < 1:
        parser.error("--layers, --width, --batch, --steps and --every must be at least 1")
    if args.context < 1 or args.context % 16:
        parser.error("--context must be a multiple of 16")
    if importlib.util.find_spec("optax") is None:
        parser.error("the optimizer of train.py needs optax, which is not installed")
    try:
        official.folder_of(args.official)
        args.vocabulary = tokenizers.load(args.tokenizer).vocab_size
    except (FileNotFoundError, ImportError, ValueError) as failure:
        parser.error(str(failure))
    return args


def config_of(args: argparse.Namespace) -> rwkv7.Config:
    return rwkv7.Config(args.layers, args.width, vocab_size=args.vocabulary)


def initial_weights(args: argparse.Namespace) -> dict[str, np.ndarray]:
    """The initial weights of rwkv_jax by their names, rounded to bfloat16, in float32. They are
    made on a CPU, so that they do not depend on the GPU."""
    jax.config.update("jax_platforms", "cpu")
    params = jax.jit(lambda: rwkv7.init(jax.random.key(args.seed), config_of(args)))()
    return {
        name: np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32))
        for name, x in rwkv7.names(params).items()
    }


def batches(args: argparse.Namespace) -> list[np.ndarray]:
    """The batch [B, T + 1] of each step, from the sources of Python's standard library."""
    sources, _ = data.read(None, "*.py")
    text = sources.tobytes().decode(errors="replace")
    tokens = np.asarray(tokenizers.load(args.tokenizer).encode(text))
    return [
        data.batch_at(step, tokens, seed=args.seed, batch=args.batch, context=args.context)
        for step in range(args.steps)
    ]


def train(
    args: argparse.Namespace,
    weights: dict[str, np.ndarray],
    dtype: str,
    layers: str | None = None,
    rounded: bool = False,
) -> list[float]:
    """The losses of rwkv_jax. `rounded` rounds all parameters to bfloat16 in the forward pass."""
    shapes = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), config_of(args)))
    params = jax.tree_util.tree_map_with_path(
        lambda path, _: jnp.asarray(
            weights[jax.tree_util.keystr(path, simple=True, separator=".")]
        ),
        shapes,
    )
    optimizer = make_optimizer(args.learning_rate, args.warmup, args.steps, args.weight_decay)
    model = {"dtype": dtype, "kernels": Kernels(args.implementation, layers)}
    rounding = _rounded if rounded else None
    step = jax.jit(training_step(optimizer, model, L2_WRAP, rounding), donate_argnums=0)
    state = jax.jit(functools.partial(initial_state, optimizer, model))(params)
    found = []
    # A GPU would multiply float32 in TF32.
    with jax.default_matmul_precision("highest" if dtype == "float32" else None):
        for tokens in batches(args):
            state, loss = step(state, tokens)
            found.append(loss)
    return [float(loss) for loss in found]


def _rounded(params: rwkv7.Params) -> rwkv7.Params:
    """The parameters rounded to bfloat16, with the gradient of the identity."""

    def rounded(x: jax.Array) -> jax.Array:
        return x + jax.lax.stop_gradient(jax.lax.reduce_precision(x, 8, 7) - x)

    return jax.tree.map(rounded, params)


def train_official(
    args: argparse.Namespace, weights: dict[str, np.ndarray], options: Mapping[str, str]
) -> list[float]:
    """The losses of the official code."""
    row = Row(args.layers, args.width, args.batch)
    training = Hyperparameters(
        learning_rate=args.learning_rate,
        final_learning_rate=args.learning_rate / 20,
        warmup=args.warmup,
        steps=args.steps,
        weight_decay=args.weight_decay,
    )
    return official.losses(
        row, args.official, options, training, args.vocabulary, weights, batches(args)
    )


def print_losses(losses: Mapping[str, Sequence[float]], every: int) -> dict[str, float]:
    """A table of the losses and of their differences from those of the official code; the largest
    difference of each column."""
    names = [name for name in losses if name != OFFICIAL]
    differences = {
        name: [abs(x - y) for x, y in zip(losses[name], losses[OFFICIAL], strict=True)]
        for name in names
    }
    titles = [title for name in names for title in (name, "difference")]
    table = Table("step", OFFICIAL, *titles, widths=(6, 10))
    last = len(losses[OFFICIAL]) - 1
    for step in sorted({*range(0, last + 1, every), last}):
        cells = (f"{x[step]:.4f}" for name in names for x in (losses[name], differences[name]))
        table.row(str(step), f"{losses[OFFICIAL][step]:.4f}", *cells)
    print()
    for name, x in differences.items():
        print(f"{name}: differs by {np.max(x):.4f} at most and {np.mean(x):.4f} on average")
    return {name: float(np.max(x)) for name, x in differences.items()}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    weights = apart(initial_weights, args)
    losses = {OFFICIAL: apart(train_official, args, weights, {"dtype": args.official_dtype})}
    for dtype in args.dtypes:
        losses[f"rwkv_jax, {dtype}"] = apart(train, args, weights, dtype)
        if args.plain:
            losses[f"rwkv_jax, {dtype}, plain"] = apart(train, args, weights, dtype, "xla")
        if args.rounded:
            own = apart(train, args, weights, dtype, None, True)
            losses[f"rwkv_jax, {dtype}, rounded"] = own
    if args.again:
        losses["official again"] = apart(train_official, args, weights, {"kernel": OLDER_KERNEL})
    largest = print_losses(losses, args.every)
    if args.json:
        args.json.write_text(json.dumps({"losses": losses, "largest": largest}, indent=1) + "\n")
    return int(not largest[f"rwkv_jax, {args.dtypes[0]}"] <= args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
