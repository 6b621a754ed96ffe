"""Train on documents longer than memory: in pieces, with the state carried from one to the next.

    python scripts/long_context.py               # gradients flow through the states between pieces
    python scripts/long_context.py --detach      # gradients stop at the states between pieces

The backward pass computes each piece again, so that memory holds one piece and the states between
pieces, however many pieces there are. Without --detach the gradients are the gradients of the whole
document at once, which the script checks before it trains. It prints how much memory each way
needs.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from rwkv_jax._training import data
from rwkv_jax._training.options import SIZES, positive
from rwkv_jax.models import rwkv7


def loss_of(
    params: rwkv7.Params, tokens: jax.Array, *, pieces: int, detach: bool = False
) -> jax.Array:
    """The mean loss of predicting each of [B, T + 1] tokens but the first, in nats per byte.

    The model reads the T tokens in `pieces` pieces. With `detach`, no gradient flows from a piece
    to the pieces before it.
    """
    batch = tokens.shape[0]

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, pieces, -1), 1, 0)

    @jax.checkpoint
    def piece(
        state: rwkv7.State, tokens: tuple[jax.Array, jax.Array]
    ) -> tuple[rwkv7.State, jax.Array]:
        inputs, labels = tokens
        if detach:
            state = jax.lax.stop_gradient(state)
        logits, state = rwkv7.apply(params, inputs, state)
        return state, optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    state = rwkv7.initial_state(params, batch)
    _, losses = jax.lax.scan(piece, state, (cut(tokens[:, :-1]), cut(tokens[:, 1:])))
    return losses.mean()


def compiled_gradient(params: rwkv7.Params, tokens: jax.Array, pieces: int) -> jax.stages.Compiled:
    """The program that computes the gradients of the parameters."""
    gradient = jax.jit(jax.grad(functools.partial(loss_of, pieces=pieces)))
    return gradient.lower(params, tokens).compile()


def compare(params: rwkv7.Params, tokens: jax.Array, pieces: int) -> float:
    """Print how much memory the gradients need, and return the relative difference between the
    gradients in pieces and the gradients of the whole document."""
    length = (tokens.shape[1] - 1) // pieces
    programs = {
        f"one piece of {length}": (1, tokens[:, : length + 1]),
        f"{pieces} pieces": (pieces, tokens),
        "the whole document": (1, tokens),
    }
    results = {}
    for name, (count, part) in programs.items():
        program = compiled_gradient(params, part, count)
        memory = program.memory_analysis()
        assert memory is not None
        megabytes = memory.temp_size_in_bytes / 2**20
        print(f"{name:24} {megabytes:8.1f} MB beside parameters and gradients")
        results[name] = program(params, part)
    _, in_pieces, whole = results.values()
    return norm(jax.tree.map(jnp.subtract, in_pieces, whole)) / norm(whole)


def norm(tree: PyTree[jax.Array]) -> float:
    """The Euclidean norm of all arrays together."""
    return sum(float(jnp.vdot(x, x)) for x in jax.tree.leaves(tree)) ** 0.5


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on long documents, piece by piece.")
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="as train.py takes it")
    add("--data", type=Path, help="as train.py takes it")
    add("--pattern", default="*.py", help="as train.py takes it")
    add("--pieces", type=positive, default=8, help="pieces of each document")
    add("--piece", type=positive, default=128, help="bytes of each piece")
    add("--batch", type=positive, default=2, help="documents in each step")
    add("--steps", type=positive, default=20, help="optimizer steps")
    add("--learning-rate", type=float, default=4e-3, help="learning rate")
    add("--seed", type=int, default=0, help="seed of parameters and data order")
    add("--detach", action="store_true", help="no gradients through the states between pieces")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    context = args.pieces * args.piece
    text, _ = data.read(args.data, args.pattern)
    data.check_size(text, context)

    def documents(step: int) -> jax.Array:
        batch = data.batch_at(step, text, seed=args.seed, batch=args.batch, context=context)
        return jnp.asarray(batch)

    params: PyTree[jax.Array] = rwkv7.init(jax.random.key(args.seed), SIZES[args.size])
    difference = compare(params, documents(0), args.pieces)
    print(f"gradients in pieces differ from those of the whole by {difference:.1e}")

    optimizer = optax.adam(args.learning_rate)
    loss = functools.partial(loss_of, pieces=args.pieces, detach=args.detach)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: PyTree[jax.Array], moments: optax.OptState, tokens: jax.Array
    ) -> tuple[PyTree[jax.Array], optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, value

    moments, losses, start = optimizer.init(params), [], time.perf_counter()
    for i in range(args.steps):
        params, moments, value = step(params, moments, documents(i))
        losses.append(float(value))
    print(
        f"{args.steps} steps on documents of {context:,} bytes: loss {losses[0]:.3f} to "
        f"{np.mean(losses[-3:]):.3f} nats a byte, {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
