"""Computes on paper how training scales over nodes of eight GPUs, for docs/pages/devices.md.

    python scripts/scaling.py
    python scripts/scaling.py --sizes 32x4096 --gpus 16 128 --gradients 4 --infiniband 25

Parameters, moments and rows are distributed over all GPUs (--mesh data=N). A GPU gathers the
weights of a block in bfloat16 where it computes the block, and keeps them for the backward pass or,
with --recompute, gathers them again. Gradients are added up at the GPUs that keep the weights.
"""

import argparse
import re
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

RANKS = {768: 288, 1024: 288, 2048: 512, 4096: 832}
"""The ranks of the four low-rank maps of the official models up to 7.2B, added up, by width."""

SHARES = {768: 0.42, 1024: 0.43, 2048: 0.55, 4096: 0.58}
"""The share of the peak on one GPU, by width: docs/benchmarks/h200/training.txt."""

ARRAYS = {"-": 22.0, "cheap": 10.5}
"""How many arrays of the size of the activations the forward pass keeps of a block, by --recompute;
computed from the temporaries in docs/benchmarks/h200/training.txt. Of "blocks" it is one array."""

SLOWER = {"-": 1.0, "cheap": 1.04, "blocks": 4 / 3}
"""How much longer a step takes, by --recompute."""

NODE, LOGITS = 8, 1.0  # GPUs; GB that the loss takes

Args: TypeAlias = argparse.Namespace


class Model(NamedTuple):
    """Sizes, and how many parameters they make."""

    layers: int
    width: int
    vocabulary: int

    @property
    def block(self) -> int:
        return 12 * self.width**2 + 2 * self.width * RANKS[self.width]

    @property
    def ends(self) -> int:  # the embedding and the head
        return 2 * self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.ends

    @property
    def flops(self) -> int:
        """Operations of training on a token, without those of --recompute. States have 64 numbers
        for each channel."""
        matrices = self.layers * self.block + self.ends // 2
        return 6 * (matrices + 4 * 64 * self.layers * self.width)


def memory(model: Model, gpus: int, recompute: str, args: Args) -> float:
    """GB of a GPU: its part of the parameters, both moments and the gradients; whole weights, and
    whole gradients of two blocks and of the ends of the model; activations; the loss."""
    state = (3 * 4 + args.gradients) * model.parameters / gpus
    blocks = (model.layers if recompute == "-" else 2) * model.block
    whole = 2 * (blocks + model.ends) + args.gradients * 2 * model.block + 4 * model.ends
    array = 2 * args.tokens * model.width
    kept = model.layers * ARRAYS.get(recompute, 1.0) + (recompute == "blocks") * ARRAYS["-"]
    return (state + whole + kept * array) / 1e9 + LOGITS


def compute(model: Model, recompute: str, share: float, args: Args) -> float:
    """Milliseconds of a step on one GPU."""
    return SLOWER[recompute] * args.tokens * model.flops / (share * args.peak * 1e9)


def exchange(model: Model, gpus: int, recompute: str, args: Args) -> tuple[float, float]:
    """GB that a GPU receives in a step, and sends as well, and the milliseconds that this takes.
    NCCL sends along rings of all GPUs, each of which leaves a node through another network adapter;
    each gathering and each sum of the gradients of a block is a collective."""
    gathered = 1 if recompute == "-" else 2
    weights = 2 * (gathered * model.layers * model.block + model.ends)
    gradients = args.gradients * model.layers * model.block + 4 * model.ends
    moved = (weights + gradients) * (gpus - 1) / gpus / 1e9
    nodes = -(-gpus // NODE)
    rate = args.nvlink if nodes == 1 else min(args.nvlink, NODE * args.infiniband)
    inside, between = args.hops
    ring = between * (nodes - 1) + inside * (gpus - nodes)
    return moved, 1e3 * moved / rate + (gathered + 1) * model.layers * ring / 1e3


def row(model: Model, gpus: int, share: float, args: Args) -> list[str]:
    needed = {name: memory(model, gpus, name, args) for name in SLOWER}
    recompute = next((x for x in SLOWER if needed[x] <= 0.9 * args.memory), "blocks")
    step = compute(model, recompute, share, args)
    moved, time = exchange(model, gpus, recompute, args)
    # No more is hidden than there is to compute.
    shown = [step + max((1 - hidden) * time, time - step) for hidden in (0, args.hidden)]
    sizes = " / ".join(f"{needed[x]:.0f}" for x in SLOWER)
    work = [f"{model.layers} x {model.width}", f"{gpus}", sizes, recompute, f"{step:.0f}"]
    efficiency = " / ".join(f"{step / x:.0%}" for x in shown)
    tokens = " / ".join(f"{gpus * args.tokens / x:,.0f}" for x in shown)
    return [*work, f"{moved:.1f}", f"{time:.0f}", efficiency, tokens]


def table(args: Args) -> str:
    columns = ["layers x width", "GPUs", "GB", "recompute", "compute, ms", "exchanged, GB"]
    columns += ["exchange, ms", "efficiency", "thousand tokens/s"]
    rows = [columns, ["---"] * len(columns)]
    for layers, width in args.sizes:
        model = Model(layers, width, args.vocabulary)
        rows += [row(model, gpus, args.share or SHARES[width], args) for gpus in args.gpus]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def size(text: str) -> tuple[int, int]:
    """For `type` of an option."""
    if not (match := re.fullmatch(r"(\d+)x(\d+)", text)) or int(match[2]) not in RANKS:
        widths = ", ".join(map(str, RANKS))
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYERSxWIDTH with a width of {widths}")
    return int(match[1]), int(match[2])


def parse(argv: Sequence[str] | None = None) -> Args:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    default = [(24, 2048), (32, 4096), (61, 4096)]
    add("--sizes", nargs="+", type=size, default=default, metavar="LAYERSxWIDTH")
    add("--gpus", nargs="+", type=int, default=[8, 64, 512])
    add("--vocabulary", type=int, default=65536)
    add("--tokens", type=int, default=4 * 4096, help="tokens of a step on each GPU")
    add("--share", type=float, help="share of the peak on one GPU; the measured one if not given")
    add("--peak", type=float, default=989, help="TFLOP/s of a GPU")
    add("--memory", type=float, default=80, help="GB of a GPU, of which 90 %% are used")
    add("--nvlink", type=float, default=360, help="usable GB/s of a GPU in one direction")
    add("--infiniband", type=float, default=46, help="usable GB/s of the adapter of a GPU")
    add("--hops", nargs=2, type=float, default=[1.9, 4.0], help="us inside and between nodes")
    add("--gradients", type=int, choices=(2, 4), default=2, help="bytes of a number, in blocks")
    add("--hidden", type=float, default=0.8, help="share of the exchange under computation")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    print(table(parse(argv)), end="")


if __name__ == "__main__":
    main()
