"""The model `rwkv_jax` of lm-evaluation-harness, on tasks in files, against numbers by hand."""

import functools
import importlib
import importlib.metadata
import json
import math
import tomllib
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax import generation, models, tokenizers
from rwkv_jax.models import rwkv7
from support import checkpoints
from support.commands import Command
from support.models import predicted
from support.vocabularies import write_vocabulary

datasets, evaluator, tasks, adapter = (
    cast(Any, importlib.import_module(name))
    for name in ("datasets", "lm_eval.evaluator", "lm_eval.tasks", "rwkv_jax.evaluation.lm_eval")
)

WORDS = (" time", " a", "Once", "oon", "\n\n")
DOCUMENTS: list[dict[str, Any]] = [
    {"text": "Once upon a time", "choices": [" time", " a", " noon!"], "gold": 0},
    {"text": "N oon", "choices": ["oon", "\n\nat six", " a"], "gold": 2},
    {"text": "Tea at four?\n\nOnce", "choices": [" tea", " aa", " time"], "gold": 2},
]
TASKS: dict[str, dict[str, Any]] = {
    "words": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "text",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc"}],
    },
    "whole": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "text",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


class Files(NamedTuple):
    """A model, its tokenizer, and the folder of the tasks."""

    model: Path
    tokenizer: Path
    tasks: Path

    def as_model(self, **options: Any) -> Any:
        return adapter.Model(str(self.model), tokenizer=str(self.tokenizer), **options)

    @property
    def loaded(self) -> tuple[Any, tokenizers.Tokenizer]:
        size = 257 + len(WORDS)
        return models.load(self.model).params, tokenizers.load(self.tokenizer, size)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The model is of random numbers, and likes the first word."""
    folder = tmp_path_factory.mktemp("harness")
    tensors = checkpoints.rwkv7(layers=1, vocabulary=257 + len(WORDS))
    tensors["head.weight"][257] = 3 * tensors["ln_out.bias"]
    path = checkpoints.write_safetensors(folder / "model.safetensors", tensors)
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(x) + "\n" for x in DOCUMENTS))
    for name, task in TASKS.items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        whole = {"task": f"rwkv_jax_{name}", "test_split": "test", **source, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return Files(path, write_vocabulary(folder / "words.txt", WORDS), folder)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No hub, no forks, and no files elsewhere."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")


def after(files: Files, context: str, continuation: str) -> tuple[float, bool]:
    """The log probability of a continuation whose tokens are not joined with those before it."""
    params, tokenizer = files.loaded
    before, last = [0, *tokenizer.encode(context)], tokenizer.encode(continuation)
    assert before[1:] + last == tokenizer.encode(context + continuation)
    log_probs, greedy = predicted(rwkv7, params, before + last)
    return log_probs[len(before) - 1 :].sum(), bool(greedy[len(before) - 1 :].all())


def test_tasks(files: Files, command: Command) -> None:
    """All kinds of requests, by the name of the model, and through the command."""
    arguments = {"path": str(files.model), "tokenizer": str(files.tokenizer), "batch_size": 2}
    names = [f"rwkv_jax_{name}" for name in TASKS]
    manager = tasks.TaskManager(include_path=str(files.tasks), include_defaults=False)
    found = evaluator.simple_evaluate(
        model="rwkv_jax", model_args=arguments, tasks=names, task_manager=manager, bootstrap_iters=0
    )
    words, choices, whole, answers = (found["results"][name] for name in names)

    parts = [x["text"].rpartition(" ") for x in DOCUMENTS]
    expected = [after(files, before, space + word) for before, space, word in parts]
    perplexity = math.exp(-np.mean([x for x, _ in expected]))
    assert words["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)
    assert words["acc,none"] == np.mean([greedy for _, greedy in expected]) == 1 / 3

    right = [
        np.argmax([after(files, x["text"], y)[0] for y in x["choices"]]) == x["gold"]
        for x in DOCUMENTS
    ]
    assert choices["acc,none"] == np.mean(right)

    params, tokenizer = files.loaded
    texts = [x["text"] for x in DOCUMENTS]
    log_probs = [predicted(rwkv7, params, [0, *tokenizer.encode(x)])[0].sum() for x in texts]
    bits = -sum(log_probs) / math.log(2) / sum(len(x.encode()) for x in texts)
    assert whole["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)

    prompts = [[0, *tokenizer.encode(x)] for x in texts]
    greedy = generation.Sampling(temperature=0)
    tokens = generation.generate(rwkv7, params, prompts, 6, sampling=greedy, stop_tokens=[0]).tokens
    samples = sorted(found["samples"]["rwkv_jax_answers"], key=lambda x: x["doc_id"])
    given = [x["resps"][0][0] for x in samples]
    assert given == [tokenizer.decode(x).partition("\n\n")[0] for x in tokens]
    assert answers["exact_match,none"] == 0

    line = ["eval", files.model, "--tokenizer", files.tokenizer, "--tasks", ",".join(names)]
    line += ["--include-path", files.tasks, "--batch", 2]
    shown = json.loads(command(*line, "--json").out)["tasks"]
    for name in names:
        for metric, value in found["results"][name].items():
            if metric.endswith(",none") and "stderr" not in metric:
                assert shown[name][metric] == pytest.approx(value, rel=1e-4)
    assert f"|{names[1]}" in command(*line, "--limit", 2, "--shots", 0).out


def test_tasks_that_are_not_there(
    files: Files, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded, but for the tasks of lm-eval, which take seconds to find."""
    alone = functools.partial(tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(
        tasks, "TaskManager", lambda **given: alone(include_path=given["include_path"])
    )
    line = ("--include-path", files.tasks, "--tasks", "rwkv_jax_words,no_such_task")
    error = command.refused("eval", "no.pth", *line)
    assert "--tasks has 'no_such_task'; accepted are the names" in error


def test_data_that_is_broken(files: Files, tmp_path: Path, command: Command) -> None:
    """In one line, as errors of files."""
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    task = json.loads((files.tasks / "words.yaml").read_text()) | {"task": "broken"}
    task["dataset_kwargs"] = {"data_files": {"test": str(tmp_path / "broken.jsonl")}}
    (tmp_path / "broken.yaml").write_text(json.dumps(task))
    line = ["eval", files.model, "--tokenizer", files.tokenizer, "--tasks", "broken"]
    error = command.refused(*line, "--include-path", tmp_path)
    assert "rwkv-jax eval: --tasks is broken: " in error.splitlines()[-1]
    assert "JSON parse error" in error.splitlines()[-1]


class Request(NamedTuple):
    args: tuple[Any, ...]


def test_where_a_continuation_begins(files: Files) -> None:
    """Spaces before it belong to it, and so does a token that the context alone would not have."""
    model, (params, tokenizer) = files.as_model(), files.loaded
    for context, continuation, begins in (
        ("Once ", "a", 1),
        ("Once", " a", 1),
        ("no", "on", 1),
        ("", "Once a", 0),
        (" ", "a", 0),
    ):
        tokens = tokenizer.encode(context + continuation)
        log_probs, greedy = predicted(rwkv7, params, [0, *tokens])
        ((log_prob, is_greedy),) = model.loglikelihood([Request((context, continuation))], True)
        assert log_prob == pytest.approx(log_probs[begins:].sum(), rel=1e-4)
        assert is_greedy == greedy[begins:].all()


def test_beginnings(files: Files, tmp_path: Path) -> None:
    """Without the token of the end of a text, which a text without context has anyway, and from a
    state of state tuning."""
    params, tokenizer = files.loaded
    tokens = tokenizer.encode("Once upon")
    log_probs, _ = predicted(rwkv7, params, tokens)
    pairs = [Request(("Once", " upon")), Request(("", "Once upon"))]
    (first, _), (second, _) = files.as_model(bos=False).loglikelihood(pairs, True)
    assert first == pytest.approx(log_probs.sum(), rel=1e-4)
    assert second == pytest.approx(after(files, "", "Once upon")[0], rel=1e-4)

    rng, initial = np.random.default_rng(0), rwkv7.initial_state(params, 1)
    tuned = tuple(
        x._replace(att=x.att._replace(wkv=jnp.asarray(rng.standard_normal(x.att.wkv.shape), "f4")))
        for x in initial
    )
    models.save_state(tmp_path / "state.pth", tuned)
    logits, _ = rwkv7.apply(params, np.array([[0, *tokens[:-1]]]), tuned)
    logits = np.asarray(logits[0], np.float64)
    right = (logits - np.log(np.exp(logits).sum(1, keepdims=True)))[
        range(len(tokens)), tokens
    ].sum()
    model = files.as_model(initial_state=str(tmp_path / "state.pth"))
    assert model.loglikelihood_rolling([Request(("Once upon",)), Request(("",))], True) == [
        *(pytest.approx(right, rel=1e-4), 0.0)
    ]


def test_sampling(files: Files) -> None:
    """With the settings of a request, and a seed of its own."""
    settings = {"until": "@", "max_gen_toks": 20, "temperature": 1.5, "top_p": 0.9, "top_k": 50}
    model = files.as_model(batch_size="auto", max_batch_size=2)
    one, other, again = (
        model.generate_until([Request(("Once", settings | x))] * 2, True)
        for x in ({}, {"temperature": 0.0}, {"num_beams": 1})
    )
    assert one == again
    assert one[0] != one[1]
    assert other[0] == other[1]


def test_what_is_refused(files: Files, tmp_path: Path) -> None:
    model = files.as_model()
    with pytest.raises(ValueError, match="rwkv_jax: a continuation is empty"):
        model.loglikelihood([Request(("Once", ""))], True)
    with pytest.raises(ValueError, match="has the settings beams, num_beams; accepted are until,"):
        model.generate_until([Request(("Once", {"num_beams": 2, "beams": 1}))], True)
    with pytest.raises(ValueError, match="rwkv_jax: batch_size is 0; accepted is an integer"):
        files.as_model(batch_size="0")
    letters = checkpoints.write_model(tmp_path, layers=1, vocabulary=256)
    model = adapter.Model(str(letters))
    for call in (
        lambda: model.loglikelihood([Request(("", "a"))], True),
        lambda: model.generate_until([Request(("", {}))], True),
    ):
        with pytest.raises(ValueError, match="a context is empty, and the tokenizer bytes has no"):
            call()
    assert model.loglikelihood_rolling([Request(("a",))], True) == [0.0]


def test_the_entry_point() -> None:
    """By which lm-eval finds plugins."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    group = tomllib.loads(project.read_text())["project"]["entry-points"]["lm_eval.models"]
    entry = importlib.metadata.EntryPoint("rwkv_jax", group["rwkv_jax"], "lm_eval.models")
    assert entry.load() is adapter.Model
