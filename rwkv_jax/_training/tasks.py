"""Tasks: questions with exact answers, which are drawn from a seed instead of read from files.

A document is a question with its answer. Only the bytes of the answer count in the loss, and a
trained model is judged by whether it gives whole answers without an error.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from rwkv_jax._training.data import Batch, ByStep

TRAINING, HELD_OUT, JUDGED = range(3)
"""What examples are drawn for, which goes into their seed, so that no two uses share examples."""


class Example(NamedTuple):
    """A question and its answer, neither of which has a zero byte."""

    question: bytes
    answer: bytes


class Task(NamedTuple):
    """A task.

    Attributes:
      draw: draws an example from a random generator and a length from 1 on.
      longest: the greatest length.
      options: defaults of the options of train.py.
    """

    draw: Callable[[np.random.Generator, int], Example]
    longest: int
    options: Mapping[str, str | int | float]


def reverse(rng: np.random.Generator, length: int) -> Example:
    """`length` random digits, and the same digits from the last to the first."""
    digits = bytes(rng.integers(10, size=length, dtype=np.uint8) + ord("0"))
    return Example(digits + b"=", digits[::-1] + b"\n")


TASKS: Mapping[str, Task] = {
    "reverse": Task(
        reverse,
        longest=60,
        options={
            "size": "recall",
            "steps": 200_000,
            "batch": 2,
            "context": 512,
            "learning_rate": 2e-3,
            "weight_decay": 0.0,
            "l2_wrap": 0.0,
            "eval_every": 5000,
            "save_every": 5000,
            "prompt": "0123456789=",
        },
    )
}

Answer: TypeAlias = Callable[[np.ndarray, int], np.ndarray]
"""Answers [B, length] to questions [B, L], which begin with zeros where they are shorter than L,
and that length."""


class Examples(ByStep):
    """What train.py trains on for a task: documents that are packed into rows.

    The length of each document is random. The greatest length grows from one to that of --longest
    in the share --growth of the steps.
    """

    ngrams: Mapping[str, float] = {}
    checksums: Sequence[Sequence[int]] = ()
    tokens: int | None = None

    def __init__(self, args: argparse.Namespace):
        self._task, self._seed = TASKS[args.task], args.seed
        self._longest = args.longest or self._task.longest
        self._batch, self._context = args.batch, args.context
        self._growing = args.growth * args.steps
        rng = self._rng(HELD_OUT)
        question, answer = self._task.draw(rng, self._longest)
        if (needed := len(question + answer) - 1) > self._context:
            sys.exit(f"--context is {self._context}; documents need {needed} or more")
        self.held_out = self._rows(rng, max(1, args.eval_tokens // self._context), self._longest)

    def __str__(self) -> str:
        return f"questions up to length {self._longest}, {self._context} bytes in each row"

    def batch(self, step: int) -> Batch:
        """Rows that depend on the seed, the number of steps and the step alone."""
        longest = self._longest
        if step < self._growing:
            longest = 1 + int(longest * step / self._growing)
        return self._rows(self._rng(TRAINING, step), self._batch, longest)

    def exact(self, answer: Answer, count: int) -> dict[int, float]:
        """Which share of `count` new questions of each length `answer` answers without an error."""
        longest, rng = self._longest, self._rng(JUDGED)
        size, answer_size = map(len, self._task.draw(rng, longest))
        shares = {}
        for length in range(1, longest + 1):
            examples = [self._task.draw(rng, length) for _ in range(count)]
            padded = b"".join(example.question.rjust(size, b"\0") for example in examples)
            questions = np.frombuffer(padded, np.uint8).reshape(count, size).astype(np.int32)
            answers = answer(questions, answer_size).astype(np.uint8)
            right = [
                bytes(given[: len(example.answer)]) == example.answer
                for given, example in zip(answers, examples, strict=True)
            ]
            shares[length] = sum(right) / count
        return shares

    def _rng(self, use: int, step: int = 0) -> np.random.Generator:
        return np.random.default_rng((self._seed, use, step))

    def _rows(self, rng: np.random.Generator, rows: int, longest: int) -> Batch:
        """Each row has as many documents as it has room for, and then zeros."""
        shape = rows, self._context + 1
        tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        segment_ids = np.zeros(shape, np.int32)
        for row in range(rows):
            begin = 0
            for number, (question, answer) in enumerate(self._documents(rng, longest), 1):
                middle = begin + len(question)
                end = middle + len(answer)
                if end > self._context + 1:
                    break
                tokens[row, begin:end] = np.frombuffer(question + answer, np.uint8)
                mask[row, middle:end] = True
                segment_ids[row, begin:end] = number
                begin = end
        return Batch(tokens[:, :-1], tokens[:, 1:], mask[:, 1:], segment_ids[:, :-1])

    def _documents(self, rng: np.random.Generator, longest: int) -> Iterator[Example]:
        while True:
            yield self._task.draw(rng, int(rng.integers(1, longest + 1)))
