"""Time a pool of `rwkv_jax.serving` on requests that come at random times.

    python scripts/bench_serving.py                        # a small random model, a minute on a CPU
    python scripts/bench_serving.py --rate 2 --slots 4     # fewer requests a second
    python scripts/bench_serving.py --shared 0             # prompts without a common beginning
    python scripts/bench_serving.py --model model.pth --dtype bfloat16 --slots 64 --readers 4 \\
        --prefill-chunks 64 256 --requests 500 --rate 50           # a checkpoint on a GPU

Requests arrive as a Poisson process. The lengths of prompts and of answers are geometrically
distributed, and all prompts begin with the same --shared tokens. The contestants get the same
requests at the same times: a pool; a pool that keeps no states, and so reads the beginning of each
prompt again; and `TokenStream`, one request after another. Everything is compiled before.

"first token" is the time from the arrival of a request to its first token, "a token" the mean time
between the tokens of a request, and "pause" the longest time between two of its tokens. Each has
the median and the 99th percentile of all requests, in milliseconds. On a machine that is busy with
other things, --clock cpu takes the time of the processor instead, and skips the waiting for
arrivals.
"""

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent))

import jax
import numpy as np

from benchmarking.report import Table
from rwkv_jax import models
from rwkv_jax._training.options import SIZES, positive
from rwkv_jax.generation import Sampling, TokenStream
from rwkv_jax.models import rwkv7
from rwkv_jax.serving import Pool, Request

SAMPLING = Sampling(top_p=0.9, presence_penalty=0.2, frequency_penalty=0.2, decay=0.996)


class Job(NamedTuple):
    """A request: when it arrives, in seconds, its prompt, and how many tokens its answer has."""

    arrival: float
    prompt: list[int]
    answer: int


class Outcome(NamedTuple):
    """What came of a request: its tokens, when it and each of them came, in seconds, and how many
    tokens of its prompt were not read, because a state was kept."""

    tokens: list[int]
    arrival: float
    times: list[float]
    unread: int


class Model(NamedTuple):
    """A model, and the options of whatever runs it."""

    module: ModuleType
    params: Any
    options: dict[str, Any]


class Clock:
    """Seconds since the clock was made: of the wall, or with `cpu` those of computing, and of
    waiting for arrivals, which is skipped."""

    def __init__(self, cpu: bool):
        self._read = time.process_time if cpu else time.perf_counter
        self._cpu, self._begin = cpu, self._read()

    def now(self) -> float:
        return self._read() - self._begin

    def wait_until(self, when: float) -> None:
        if (left := when - self.now()) <= 0:
            return
        if self._cpu:
            self._begin -= left
        else:
            time.sleep(left)


def jobs_of(args: argparse.Namespace, vocabulary: int) -> list[Job]:
    rng = np.random.default_rng(args.seed)
    shared = rng.integers(0, vocabulary, args.shared).tolist()
    arrivals = np.cumsum(rng.exponential(1 / args.rate, args.requests))
    means = args.prompt, args.answer
    prompts, answers = (rng.geometric(1 / mean, args.requests) for mean in means)
    return [
        Job(arrival, shared + rng.integers(0, vocabulary, prompt).tolist(), int(answer))
        for arrival, prompt, answer in zip(arrivals.tolist(), prompts, answers, strict=True)
    ]


def in_a_pool(pool: Pool, clock: Clock, jobs: Sequence[Job]) -> list[Outcome]:
    """The requests by the explicit loop: a scheduler step as long as there is something to do."""
    requests: list[Request] = []
    times: list[list[float]] = [[] for _ in jobs]
    while len(requests) < len(jobs) or pool.running:
        if not pool.running:
            clock.wait_until(jobs[len(requests)].arrival)
        for seed in range(len(requests), len(jobs)):
            job = jobs[seed]
            if job.arrival > clock.now():
                break
            requests.append(pool.submit(job.prompt, job.answer, sampling=SAMPLING, seed=seed))
        pool.step()
        for request, known in zip(requests, times, strict=False):
            known += [clock.now()] * (len(request.tokens) - len(known))
    return [
        Outcome(request.tokens, job.arrival, known, request.cached)
        for request, job, known in zip(requests, jobs, times, strict=True)
    ]


def one_after_another(
    model: Model, prefill_chunks: Sequence[int], clock: Clock, jobs: Sequence[Job]
) -> list[Outcome]:
    outcomes = []
    for seed, job in enumerate(jobs):
        clock.wait_until(job.arrival)
        stream = TokenStream(
            *(model.module, model.params, [job.prompt], job.answer),
            sampling=SAMPLING,
            seed=seed,
            prefill_chunks=prefill_chunks,
            **model.options,
        )
        times = [clock.now() for _ in stream]
        outcomes.append(Outcome(stream.tokens[0], job.arrival, times, 0))
    return outcomes


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Tokens a second, and percentiles of times in milliseconds."""
    first = min(x.arrival for x in outcomes)
    last = max(x.times[-1] for x in outcomes)
    times = {
        "first token": [x.times[0] - x.arrival for x in outcomes],
        "a token": [np.mean(np.diff(x.times)) for x in outcomes if len(x.times) > 1],
        "pause": [np.max(np.diff(x.times)) for x in outcomes if len(x.times) > 1],
    }
    found = {"tokens/s": sum(len(x.tokens) for x in outcomes) / (last - first)}
    for name, seconds in times.items():
        for label, percentile in (("", 50), (" 99%", 99)):
            found[name + label] = 1e3 * float(np.percentile(seconds, percentile))
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    sizes = ", ".join(f"{n} = {c.num_layers}x{c.hidden_size}" for n, c in SIZES.items())
    add("--size", choices=SIZES, default="demo", help=f"layers x width of a random model: {sizes}")
    add("--model", type=Path, help="a checkpoint, instead of --size")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    add("--requests", type=positive, default=48, help="number of requests")
    add("--rate", type=float, default=20, help="requests that arrive a second, in the mean")
    add("--shared", type=int, default=128, help="tokens with which all prompts begin")
    add("--prompt", type=positive, default=64, help="tokens of a prompt after those, in the mean")
    add("--answer", type=positive, default=64, help="tokens of an answer, in the mean")
    add("--slots", type=positive, default=16, help="sequences that are decoded at once")
    add("--readers", type=positive, default=1, help="prompts that are read side by side")
    add(
        "--prefill-chunks",
        type=positive,
        nargs="+",
        default=[16, 64],
        help="lengths of prefill chunks",
    )
    add(
        "--steps",
        type=positive,
        default=8,
        help="tokens of a sequence that a scheduler step decodes",
    )
    add("--cache-mb", type=int, default=256, help="memory for states by the beginning of a prompt")
    add("--seed", type=int, default=0, help="seed of the requests and of a random model")
    add("--clock", choices=("wall", "cpu"), default="wall", help="what the times are of")
    add("--json", type=Path, help="write every figure to this file")
    args = parser.parse_args(argv)
    if args.rate <= 0 or args.shared < 0:
        parser.error("--rate must be positive, and --shared not negative")
    return args


def model_of(args: argparse.Namespace) -> Model:
    options = {"dtype": args.dtype}
    if args.model is not None:
        checkpoint = models.load(args.model, dtype=args.dtype)
        return Model(checkpoint.module, checkpoint.params, options)
    init = jax.jit(rwkv7.init, static_argnames="config")
    params = init(jax.random.key(args.seed), SIZES[args.size])
    return Model(rwkv7, jax.tree.map(lambda x: x.astype(args.dtype), params), options)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    model = model_of(args)
    jobs = jobs_of(args, len(model.params.head.weight))

    def pool(cache_bytes: int) -> Pool:
        return Pool(
            *(model.module, model.params, args.slots),
            **{name: getattr(args, name) for name in ("readers", "prefill_chunks", "steps")},
            cache_bytes=cache_bytes,
            **model.options,
        )

    pools = {"pool": pool(args.cache_mb * 2**20), "pool, no states kept": pool(0)}
    contestants: dict[str, Callable[[Clock, Sequence[Job]], list[Outcome]]] = {
        name: functools.partial(in_a_pool, x) for name, x in pools.items()
    }
    contestants["one after another"] = functools.partial(
        one_after_another, model, args.prefill_chunks
    )
    warm = [Job(0.0, [0] * (sum(args.prefill_chunks) + 1), 2) for _ in range(2)]
    read, written = sum(len(job.prompt) for job in jobs), sum(job.answer for job in jobs)
    print(
        f"{jax.devices()[0].device_kind}, {args.dtype}, {args.clock} time: {len(jobs)} requests, "
        f"{args.rate:g} a second, {read} tokens of prompts, {written} of answers\n"
    )
    table: Table | None = None
    results: dict[str, Any] = {}
    unread: dict[str, int] = {}
    answers: list[list[list[int]]] = []
    for name, run in contestants.items():
        run(Clock(False), warm)
        outcomes = run(Clock(args.clock == "cpu"), jobs)
        answers.append([x.tokens for x in outcomes])
        unread[name] = sum(x.unread for x in outcomes)
        results[name] = figures(outcomes)
        table = table or Table("", *results[name], widths=(22, 11))
        table.row(name, *(f"{x:.1f}" for x in results[name].values()))
    print(f"\n{unread['pool'] / read:.0%} of the tokens of prompts were not read by the first pool")
    pooled, without, alone = answers
    if pooled != without:
        print("error: kept states have changed tokens", file=sys.stderr)
        return 1
    same = sum(x == y for x, y in zip(pooled, alone, strict=True))
    print(f"{same} of {len(jobs)} answers are those of TokenStream; rounding changed the others")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
