"""What a finished run shows: its speed, a plot and a table of losses, and generated text."""

import argparse
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rwkv_jax import generation
from rwkv_jax._training.checkpoints import Log
from rwkv_jax._training.data import Batch
from rwkv_jax._training.language_model import Model
from rwkv_jax._training.parts import Parts
from rwkv_jax._training.sizes import flops_per_token
from rwkv_jax._training.tasks import Answer
from rwkv_jax.models import Kernels, rwkv7
from rwkv_jax.tokenizers import Tokenizer


def speed(model: Model, tokens_per_second: float, peak: float | None) -> str:
    """Tokens and operations per second, which share of `peak` TFLOP/s each device reaches, and the
    most memory that arrays of the run have had on a device, where it tells."""
    _, frozen = model.split(model.shapes)
    teraflops = tokens_per_second * flops_per_token(model.shapes.params, frozen.params) / 1e12
    share = f", {teraflops / model.mesh.size / peak:.1%} of the peak" if peak else ""
    memory = [x.memory_stats() or {} for x in model.mesh.local_devices]
    most = max(x.get("peak_bytes_in_use", 0) for x in memory)
    used = f", at most {most / 1e9:.1f} GB" if most else ""
    rate = f"{tokens_per_second:,.0f} tokens/s after the first step"
    return f"{rate}, {teraflops:.3g} TFLOP/s{share}{used}"


def plot(path: Path, log: Log, name: str) -> None:
    """Write a plot of all losses of the model of this name to `path`."""
    # Imported here, because it would take a part of a second of the start.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    steps = range(1, len(log["train"]) + 1)
    axes.plot(steps, log["train"], lw=0.5, alpha=0.6, label=f"{name}, training")
    axes.plot(*zip(*log["held_out"], strict=True), "o-", label=f"{name}, held out")
    if log["averaged"]:
        axes.plot(*zip(*log["averaged"], strict=True), "o-", label="average, held out")
    for (other, loss), style in zip(log["ngrams"].items(), (":", "--"), strict=False):
        axes.axhline(loss, color="gray", ls=style, label=f"{other}, held out")
    axes.set(xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def bytes_per_token(tokenizer: Tokenizer | None, held_out: Batch) -> float | None:
    """How many bytes of text a predicted token of the held-out rows has, if it is known."""
    targets = held_out.targets if held_out.mask is None else held_out.targets[held_out.mask]
    if tokenizer is None:
        return None
    return len(tokenizer.decode_bytes(targets.ravel())) / targets.size or None


def table(log: Log, step: int, size: float | None, name: str = "RWKV-7") -> str:
    """The held-out losses of the model of this name after a step, of the average of its parameters,
    and of the n-gram models. `size` is that of a token in bytes."""
    ours = {name: log["held_out"], "average": log["averaged"]}
    after = {of: loss for of, pairs in ours.items() for at, loss in pairs if at == step}
    lines = [f"{'held-out loss':14} nats/token" + ("  bits/byte" if size else "")]
    for of, loss in (log["ngrams"] | after).items():
        bits = f"  {loss / math.log(2) / size:9.3f}" if size else ""
        lines.append(f"{of:14} {loss:10.3f}{bits}")
    return "\n".join(lines)


def begin_of_text(held_out: Batch) -> list[int]:
    """The tokens of the first held-out document up to the first one that is predicted."""
    counts = np.ones(held_out.tokens.shape[1:], bool) if held_out.mask is None else held_out.mask[0]
    return held_out.tokens[0, : int(counts.argmax()) + 1].tolist()


def sample(
    args: argparse.Namespace, model: Model, parts: Parts, tokenizer: Tokenizer, prompt: list[int]
) -> str:
    """Text that continues the prompt, decoded one token at a time."""
    end = tokenizer.end_of_text
    new = generation.generate(
        *(model.module, parts.effective(), [prompt], args.sample),
        sampling=generation.Sampling(temperature=args.temperature),
        stop_tokens=() if end is None else (end,),
        seed=args.seed,
        state=parts.initial_state(1, args.dtype),
        dtype=args.dtype,
        kernels=Kernels(args.implementation),
    )
    return tokenizer.decode([*prompt, *new.tokens[0]])


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
