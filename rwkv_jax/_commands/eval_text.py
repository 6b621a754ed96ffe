"""`rwkv-jax eval --text`: how well a model predicts a text."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rwkv_jax._commands.evaluated import Evaluated, print_json, rows_of
from rwkv_jax._commands.output import check_target, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rwkv_jax.evaluation import Evaluation


def run(arguments: argparse.Namespace) -> None:
    """Print how well a model predicts a text, and draw the picture."""
    if arguments.plot is not None:
        formats = _figure().canvas.get_supported_filetypes()
        plot = Path(arguments.plot)
        plot = plot.with_suffix(plot.suffix.lower())  # matplotlib takes both
        check_target("--plot", str(plot), [f".{name}" for name in formats])

    from rwkv_jax.evaluation import evaluate

    try:
        text = Path(arguments.text).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{arguments.text}: the file is no text in UTF-8: {error}") from None
    model = Evaluated(arguments)
    tokens = model.tokenizer.encode(text)
    # From the end of a text before it, the first token is predicted as well.
    end = model.tokenizer.end_of_text
    start, predicted = (tokens[:1], tokens[1:]) if end is None else ([end], tokens)
    if not predicted:
        raise ValueError(f"{arguments.text}: the text has {len(tokens)} tokens, none to predict")
    size = len(model.tokenizer.decode_bytes(predicted))
    context = arguments.context or 4096
    result = model.run(evaluate, [*start, *predicted], tokens=len(predicted), context=context)
    whole = model.figures("text", arguments.text) | {
        "context": context,
        "bytes": size,
        "tokens": result.tokens,
        "bits_per_byte": result.bits_per_byte(size),
        "loss": result.loss,
        "perplexity": result.perplexity,
    }
    if arguments.json:
        print_json(whole | {"by_position": [x._asdict() for x in result.buckets()]})
    else:
        print(_text(whole, result))
    if arguments.plot is not None:
        _plot(Path(arguments.plot), Path(arguments.text).name, result)


def _text(whole: dict[str, Any], result: "Evaluation") -> str:
    """The results for a reader."""
    buckets = [("tokens before", "tokens", "loss")]
    for x in result.buckets():
        range_ = f"{x.first}" if x.first == x.last else f"{x.first} to {x.last}"
        buckets.append((range_, f"{x.tokens}", f"{x.loss:.4f}"))
    return f"{table(rows_of(whole))}\n\n{table(buckets)}"


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
