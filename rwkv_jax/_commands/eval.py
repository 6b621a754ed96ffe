"""`rwkv-jax eval`: how well a model predicts a text."""

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_jax._commands.arguments import add_dtype, add_model, add_tokenizer, positive, tokenizer_of
from rwkv_jax._commands.output import check_target, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rwkv_jax.evaluation import Evaluation

HELP = "Measure how well a model predicts a text: bits per byte, loss and perplexity."
EXAMPLES = (
    "eval model.pth --text book.txt",
    "eval model.pth --text book.txt --context 16384 --batch 2 --dtype bfloat16 --plot loss.png",
    "eval rwkv-4.pth --text book.txt --tokenizer 20B_tokenizer.json --json",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--text", metavar="FILE", required=True, help="a text in UTF-8")
    add_tokenizer(parser)
    parser.add_argument(
        "--context",
        type=positive,
        default=4096,
        help="tokens of a window; the model starts anew at each window (default: 4096)",
    )
    parser.add_argument(
        "--batch", type=positive, default=8, help="windows that are read at once (default: 8)"
    )
    add_dtype(parser, "dtype of weights and activations (default: float32)", "float32")
    parser.add_argument(
        "--plot", metavar="FILE", help="write a picture of the loss by position to this file"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the results as a JSON object, where a perplexity that no float holds is null",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot is not None:
        formats = _figure().canvas.get_supported_filetypes()
        plot = Path(arguments.plot)
        plot = plot.with_suffix(plot.suffix.lower())  # matplotlib takes both
        check_target("--plot", str(plot), [f".{name}" for name in formats])
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError("the package tqdm is missing: pip install 'rwkv-jax[text]'") from error

    from rwkv_jax import models
    from rwkv_jax.evaluation import evaluate

    try:
        text = Path(arguments.text).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{arguments.text}: the file is no text in UTF-8: {error}") from None
    model = models.inspect(arguments.model)
    tokenizer = tokenizer_of(arguments, model.config.vocab_size)
    tokens = tokenizer.encode(text)
    # From the end of a text before it, the first token is predicted as well.
    start = tokens[:1] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    predicted = tokens[1:] if tokenizer.end_of_text is None else tokens
    if not predicted:
        raise ValueError(f"{arguments.text}: the text has {len(tokens)} tokens, none to predict")
    size = len(tokenizer.decode_bytes(predicted))
    params = models.load(arguments.model, dtype=arguments.dtype).params
    with tqdm(total=len(predicted), unit=" tokens", disable=None) as bar:
        result = evaluate(
            model.module,
            params,
            [*start, *predicted],
            context=arguments.context,
            batch=arguments.batch,
            dtype=arguments.dtype,
            progress=bar.update,
        )
    whole = {
        "model": arguments.model,
        "generation": model.generation,
        "text": arguments.text,
        "tokenizer": tokenizer.name,
        "context": arguments.context,
        "dtype": arguments.dtype,
        "bytes": size,
        "tokens": result.tokens,
        "bits_per_byte": result.bits_per_byte(size),
        "loss": result.loss,
        "perplexity": result.perplexity,
    }
    if arguments.json:
        if math.isinf(result.perplexity):
            whole["perplexity"] = None
        parts = [x._asdict() for x in result.buckets()]
        print(json.dumps(whole | {"by_position": parts}, allow_nan=False))
    else:
        print(_text(whole, result))
    if arguments.plot is not None:
        _plot(Path(arguments.plot), Path(arguments.text).name, result)
    return 0


def _text(whole: dict[str, str | int | float], result: "Evaluation") -> str:
    """The results for a reader."""
    rows = [
        (name.replace("_", " "), f"{x:.5g}" if isinstance(x, float) else f"{x}")
        for name, x in whole.items()
    ]
    buckets = [("tokens before", "tokens", "loss")]
    for x in result.buckets():
        range_ = f"{x.first}" if x.first == x.last else f"{x.first} to {x.last}"
        buckets.append((range_, f"{x.tokens}", f"{x.loss:.4f}"))
    return f"{table(rows)}\n\n{table(buckets)}"


def _plot(path: Path, name: str, result: "Evaluation") -> None:
    """Write a picture of the mean loss by the number of tokens before a token."""
    from rwkv_jax.models._checkpoints.writing import replacing

    buckets = result.buckets()
    edges = [buckets[0].first, *(x.last + 1 for x in buckets)]
    figure = _figure()
    axes = figure.subplots()
    axes.stairs([x.loss for x in buckets], edges, baseline=None, lw=2)
    axes.axhline(result.loss, color="gray", ls="--", label=f"all tokens: {result.loss:.3f}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens before the predicted one", ylabel="loss (nats per token)", title=name)
    axes.legend()
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)


def _figure() -> "Figure":
    """An empty figure."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install 'rwkv-jax[text]'") from error
    return Figure(figsize=(8, 5), layout="constrained")
