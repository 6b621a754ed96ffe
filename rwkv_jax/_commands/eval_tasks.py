"""`rwkv-jax eval` with tasks: `--lambada`, `--passkey` and `--tasks`."""

# Types are also checked where lm-eval is not installed.
# pyright: reportMissingImports=false

import argparse
import contextlib
import os
import sys
from typing import Any

from rwkv_jax._commands.evaluated import Evaluated, print_json, rows_of
from rwkv_jax._commands.output import table


def lambada(arguments: argparse.Namespace) -> None:
    """Print how well a model predicts the last words of the passages in a file."""
    from rwkv_jax import evaluation

    passages = evaluation.read_lambada(arguments.lambada)
    model = Evaluated(arguments)
    found = model.run(evaluation.lambada, model.tokenizer, passages, tokens=None)
    figures = model.figures("lambada", arguments.lambada) | found._asdict()
    if arguments.json:
        print_json(figures)
    else:
        print(table(rows_of(figures)))


def passkey(arguments: argparse.Namespace) -> None:
    """Print how often a model finds a number again, by the length of the text and the depth."""
    from rwkv_jax import evaluation

    given = {name: getattr(arguments, name) for name in ("samples", "seed")}
    given = {name: x for name, x in given.items() if x is not None}
    model = Evaluated(arguments)
    lengths = arguments.passkey
    found = model.run(evaluation.passkey, model.tokenizer, lengths, tokens=None, **given)
    figures = model.figures("passkey", lengths)
    if arguments.json:
        print_json(figures | {"results": [x._asdict() for x in found]})
        return
    rows = [("length", "depth", "texts", "accuracy", "log prob")]
    for x in found:
        rows.append(
            (f"{x.length}", f"{x.depth:g}", f"{x.texts}", f"{x.accuracy:.3f}", f"{x.log_prob:.4f}")
        )
    figures["passkey"] = ", ".join(map(str, lengths))
    print(f"{table(rows_of(figures))}\n\n{table(rows)}")


def harness(arguments: argparse.Namespace) -> None:
    """Print the results of lm-evaluation-harness."""
    from rwkv_jax.evaluation.lm_eval import Model  # says what to install

    # isort: split
    import lm_eval
    from datasets.exceptions import DatasetsError
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table

    names = [name.strip() for name in arguments.tasks.split(",")]
    folder = arguments.include_path
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=folder)  # with its own tasks, which takes seconds
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ValueError(
            f"--tasks has {', '.join(map(repr, unknown))}; accepted are the names that `lm_eval ls "
            "tasks` shows, and those in --include-path"
        )
    model = Model(
        arguments.model,
        tokenizer=arguments.tokenizer,
        adapter=arguments.adapter,
        initial_state=arguments.initial_state,
        dtype=arguments.dtype,
        batch_size=arguments.batch,
    )
    evaluate: Any = lm_eval.simple_evaluate
    # Standard errors of some metrics come from resampling, for which lm-eval would fork a process
    # with threads of JAX, unless it is told to do without.
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where lm-eval says what it does
            results = evaluate(
                model,
                tasks=names,
                num_fewshot=arguments.shots,
                limit=arguments.limit,
                task_manager=manager,
                bootstrap_iters=1000,
                log_samples=False,
            )
    except DatasetsError as error:
        reason = error if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise ValueError(f"--tasks is {arguments.tasks}: {reason}") from None
    if arguments.json:
        figures = {"model": arguments.model, "dtype": arguments.dtype}
        print_json(figures | {"tasks": results["results"]})
    else:
        print(make_table(results))
        if "groups" in results:
            print(make_table(results, "groups"))
