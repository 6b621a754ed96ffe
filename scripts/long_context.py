"""Train on documents longer than memory: in pieces, with the state carried from one to the next.

    python scripts/long_context.py               # gradients through the states between pieces
    python scripts/long_context.py --detach      # states alone: what came before is not adapted

Each piece is computed again in the backward pass, so that memory holds one piece and the states
between pieces, however many there are. Without --detach the gradients are those of the whole
document at once, which the script checks before it trains. It says how much memory either needs.
"""

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax

import train
from rwkv_jax.models import rwkv7


def loss_of(
    params: rwkv7.Params, tokens: jax.Array, *, pieces: int, detach: bool = False
) -> jax.Array:
    """Mean nats a byte of predicting each of [B, N + 1] tokens but the first, in so many pieces."""
    batch = tokens.shape[0]

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(batch, pieces, -1), 1, 0)

    @jax.checkpoint
    def piece(state: rwkv7.State, part: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        inputs, labels = part
        if detach:
            state = jax.lax.stop_gradient(state)
        logits, state = rwkv7.rwkv7(params, inputs, state)
        return state, optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    state = rwkv7.initial_state(params, batch)
    _, losses = jax.lax.scan(piece, state, (cut(tokens[:, :-1]), cut(tokens[:, 1:])))
    return losses.mean()


def compiled_gradient(params: rwkv7.Params, tokens: jax.Array, pieces: int) -> Any:
    gradient = jax.jit(jax.grad(functools.partial(loss_of, pieces=pieces)))
    return gradient.lower(params, tokens).compile()


def compare(params: rwkv7.Params, tokens: jax.Array, pieces: int) -> float:
    """Prints what memory gradients need, and returns how far those in pieces are from the whole."""
    length = (tokens.shape[1] - 1) // pieces
    programs = {
        f"one piece of {length}": (1, tokens[:, : length + 1]),
        f"{pieces} pieces": (pieces, tokens),
        "the whole document": (1, tokens),
    }
    results = {}
    for name, (count, part) in programs.items():
        program = compiled_gradient(params, part, count)
        megabytes = program.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{name:24} {megabytes:8.1f} MB beside parameters and gradients")
        results[name] = program(params, part)
    _, in_pieces, whole = results.values()
    return norm(jax.tree.map(jnp.subtract, in_pieces, whole)) / norm(whole)


def norm(tree: Any) -> float:
    return sum(float(jnp.vdot(x, x)) for x in jax.tree.leaves(tree)) ** 0.5


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on long documents, piece by piece.")
    add = parser.add_argument
    add("--size", choices=train.SIZES, default="tiny")
    add("--data", type=Path, help="as train.py takes it")
    add("--pattern", default="*.py", help="as train.py takes it")
    add("--pieces", type=train.positive, default=8, help="of a document")
    add("--piece", type=train.positive, default=128, help="bytes of one")
    add("--batch", type=train.positive, default=2, help="documents a step")
    add("--steps", type=train.positive, default=20, help="optimizer steps")
    add("--learning-rate", type=float, default=4e-3)
    add("--seed", type=int, default=0, help="of parameters and data order")
    add("--detach", action="store_true", help="no gradients through the states between pieces")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    args.context = args.pieces * args.piece
    text, _ = train.read(args.data, args.pattern)
    train.check_size(text, args.context)
    params: Any = rwkv7.init(jax.random.key(args.seed), train.SIZES[args.size])
    difference = compare(params, jnp.asarray(train.batch_at(0, text, args)), args.pieces)
    print(f"gradients in pieces differ from those of the whole by {difference:.1e}")

    optimizer = optax.adam(args.learning_rate)
    loss = functools.partial(loss_of, pieces=args.pieces, detach=args.detach)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses, start = optimizer.init(params), [], time.perf_counter()
    for i in range(args.steps):
        params, state, value = step(params, state, jnp.asarray(train.batch_at(i, text, args)))
        losses.append(float(value))
    print(
        f"{args.steps} steps on documents of {args.context:,} bytes: loss {losses[0]:.3f} to "
        f"{np.mean(losses[-3:]):.3f} nats a byte, {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
