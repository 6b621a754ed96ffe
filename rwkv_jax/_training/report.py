"""What a finished run shows: its speed, a plot and a table of losses, and generated text."""

import argparse
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rwkv_jax import generation
from rwkv_jax._training.checkpoints import Log
from rwkv_jax._training.sizes import flops_per_token
from rwkv_jax._training.tasks import Answer
from rwkv_jax.models import Kernels, rwkv7


def speed(mesh: Mesh, params: rwkv7.Params, tokens_per_second: float, peak: float | None) -> str:
    """Tokens and operations per second, and which share of `peak` TFLOP/s each device reaches."""
    teraflops = tokens_per_second * flops_per_token(params) / 1e12
    share = f", {teraflops / mesh.size / peak:.1%} of the peak" if peak else ""
    return f"{tokens_per_second:,.0f} tokens/s after the first step, {teraflops:.3g} TFLOP/s{share}"


def plot(path: Path, log: Log) -> None:
    """Write a plot of all losses to `path`."""
    # Imported here, because it would take a part of a second of the start.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(
        range(1, len(log["train"]) + 1), log["train"], lw=0.5, alpha=0.6, label="RWKV-7, training"
    )
    axes.plot(*zip(*log["held_out"], strict=True), "o-", label="RWKV-7, held out")
    if log["averaged"]:
        axes.plot(*zip(*log["averaged"], strict=True), "o-", label="average, held out")
    for (name, loss), style in zip(log["ngrams"].items(), (":", "--"), strict=False):
        axes.axhline(loss, color="gray", ls=style, label=f"{name}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def table(log: Log, step: int) -> str:
    """The held-out losses of the model after a step, of the average of its parameters, and of the
    n-gram models."""
    lines = [f"{'held-out loss':14} nats/byte  bits/byte"]
    ours = {"RWKV-7": log["held_out"], "average": log["averaged"]}
    after = {name: loss for name, pairs in ours.items() for at, loss in pairs if at == step}
    for name, loss in (log["ngrams"] | after).items():
        lines.append(f"{name:14} {loss:9.3f}  {loss / math.log(2):9.3f}")
    return "\n".join(lines)


def sample(args: argparse.Namespace, params: rwkv7.Params) -> str:
    """Text that continues the prompt, decoded one byte at a time."""
    prompt = args.prompt.encode()
    new = generation.generate(
        *(rwkv7, params, [list(prompt)], args.sample),
        sampling=generation.Sampling(temperature=args.temperature),
        seed=args.seed,
        dtype=args.dtype,
        kernels=Kernels(args.implementation),
    )
    # With a larger vocabulary there are tokens that are no bytes.
    return (prompt + bytes(x for x in new.tokens[0] if x < 256)).decode(errors="replace")


def answering(args: argparse.Namespace, params: rwkv7.Params) -> Answer:
    """What the model answers, with the most likely byte each time."""

    def answer(questions: np.ndarray, length: int) -> np.ndarray:
        options = args.dtype, Kernels(args.implementation)
        return np.asarray(_answers(params, jnp.asarray(questions), length, *options))

    return answer


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _answers(
    params: rwkv7.Params,
    questions: jax.Array,
    length: int,
    dtype: str,
    kernels: Kernels,
) -> jax.Array:
    apply = functools.partial(rwkv7.apply, params, dtype=dtype, kernels=kernels)

    def decode(
        carry: tuple[jax.Array, rwkv7.State], _: None
    ) -> tuple[tuple[jax.Array, rwkv7.State], jax.Array]:
        logits, state = apply(*carry)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return (token, state), token

    read = questions[:, :-1]
    _, state = apply(read, segment_ids=(read > 0).astype(jnp.int32))
    _, tokens = jax.lax.scan(decode, (questions[:, -1], state), length=length)
    return tokens.T


def exact_table(shares: Mapping[int, float], count: int) -> str:
    """How many of `count` answers of each length are right, ten lengths to a line."""
    lines = ["length of questions  exact answers"]
    lengths = list(shares)
    groups = {f"{i + 1} to {i + 10}": lengths[i : i + 10] for i in range(0, len(lengths), 10)}
    for name, group in (groups | {"all": lengths}).items():
        right = round(sum(shares[length] for length in group) * count)
        asked = len(group) * count
        lines.append(f"{name:19}  {right:,} of {asked:,}, {right / asked:.2%}")
    return "\n".join(lines)
