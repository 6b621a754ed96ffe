"""The model `rwkv_jax` of lm-evaluation-harness.

    python -m rwkv_jax.evaluation.lm_eval --model rwkv_jax --model_args path=model.pth --tasks piqa

is the program `lm_eval` with the model, with the same arguments. This package also names the model
in the entry points `lm_eval.models`, at which releases of lm-eval up to 0.4.13 do not look.
"""

# Types are also checked where lm-eval is not installed.
# pyright: reportMissingImports=false

import importlib
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

try:
    # All other models first: lm-eval looks for none of them where there is one already.
    importlib.import_module("lm_eval.models")
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
except ImportError as error:
    raise ImportError("the package lm-eval is missing: pip install 'rwkv-jax[lm-eval]'") from error

from rwkv_jax import finetuning, models, tokenizers
from rwkv_jax._operator import check
from rwkv_jax.evaluation._continuations import continuations
from rwkv_jax.evaluation._scores import score
from rwkv_jax.generation import PREFILL_CHUNKS, Sampling
from rwkv_jax.serving import Pool, Request

_BATCH = 8
_SAMPLING = ("temperature", "top_p", "top_k")


class Model(LM):
    """A checkpoint as a model of lm-eval.

    Every text begins with the token of the end of a text, as in the training of these models and in
    the evaluation of RWKV-LM. No text is too long, so none is cut.

    Args:
      path: the checkpoint, as `models.load` takes it.
      tokenizer: as `tokenizers.load` takes it; if None, the file in the folder `path`, or what the
        size of the vocabulary tells.
      adapter: a folder with an adapter, as `finetuning.load_adapter` takes it.
      initial_state: a file with a state from state tuning, which every text starts from.
      dtype: the dtype of weights and activations.
      batch_size: how many rows go through the model at once; "auto" for `max_batch_size`.
      max_batch_size: what "auto" stands for; 8 if None.
      chunk_size: how many tokens of a row go through the model at once, at most.
      max_gen_toks: the largest number of tokens of an answer, where a task does not say it.
      bos: whether texts begin with the token of the end of a text. Without, those do that would
        have no context otherwise. A tokenizer without such a token has nothing in its place.
      device: not used, because lm-eval names a device of PyTorch unasked. JAX chooses the device.

    Raises:
      OSError, ValueError, TypeError, ImportError: the model, the tokenizer or the state cannot be
        loaded, or an argument is not accepted.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str | None = None,
        adapter: str | None = None,
        initial_state: str | None = None,
        dtype: str = "float32",
        batch_size: int | str = _BATCH,
        max_batch_size: int | None = None,
        chunk_size: int = 1024,
        max_gen_toks: int = 256,
        bos: bool = True,
        device: str | None = None,
    ):
        super().__init__()
        if isinstance(batch_size, str) and batch_size.isdecimal():
            batch_size = int(batch_size)
        self._batch: Any = (max_batch_size or _BATCH) if batch_size == "auto" else batch_size
        sizes = {"batch_size": self._batch, "chunk_size": chunk_size, "max_gen_toks": max_gen_toks}
        for name, size in sizes.items():
            check.number("rwkv_jax", name, size, 1)
        size = models.inspect(path).config.vocab_size
        name = tokenizer or tokenizers.for_vocabulary(size, checkpoint=path)
        self._tokenizer = tokenizers.load(name, size)
        checkpoint = models.load(path, dtype=dtype)
        params = checkpoint.params
        if adapter is not None:
            found = finetuning.load_adapter(adapter, params, dtype=dtype)
            params = finetuning.adapted(params, found)
        self._module, self._params = checkpoint.module, models.for_decoding(params)
        self._options: dict[str, Any] = {"state": None, "dtype": dtype}
        if initial_state is not None:
            self._options["state"] = models.load_state(initial_state, self._params, dtype=dtype)
        self._chunk_size, self._max_gen_toks, self._bos = chunk_size, max_gen_toks, bos

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps requests by."""
        return self._tokenizer.name

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For each request, a context and a continuation: the log probability of the continuation,
        and whether each of its tokens was the most probable one. They are encoded together, and the
        continuation begins with the first token that the context alone would not have. Whitespace
        at the end of the context belongs to the continuation, as with other models of lm-eval.

        Raises:
          ValueError: a continuation is empty, or no token comes before one.
        """
        pairs = [self._pair(*request.args) for request in requests]
        lengths = [len(x) + len(y) for x, y in pairs]
        found = self._measured(continuations, pairs, lengths, disable_tqdm)
        return [(x.log_prob, x.greedy) for x in found]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log probability of each text, of which every token is predicted from all before it.
        The first token of a text is predicted only after that of the end of a text, which not all
        tokenizers have."""
        end = self._tokenizer.end_of_text
        start = [] if end is None else [end]
        texts = [start + self._tokenizer.encode(*request.args) for request in requests]
        long = [x for x in texts if len(x) > 1]
        found = iter(self._measured(score, long, map(len, long), disable_tqdm))
        return [float(next(found).log_probs.sum(dtype=float)) if len(x) > 1 else 0.0 for x in texts]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to one of the texts `until`, or to the end of the text.

        Raises:
          ValueError: a context is empty and the tokenizer has no token for the end of a text; or
            the settings of a request have another name than `until`, `max_gen_toks`, `do_sample`,
            `temperature`, `top_p` and `top_k`, or a value that is not accepted.
          FloatingPointError: a logit is NaN or infinite.
        """
        pool = Pool(
            *(self._module, self._params, self._batch),
            tokenizer=self._tokenizer,
            prefill_chunks=PREFILL_CHUNKS,
            **self._options,
        )
        with pool:
            answers = [self._submitted(pool, i, *x.args) for i, x in enumerate(requests)]
            for answer in tqdm(answers, unit=" answers", disable=disable_tqdm):
                while answer.finish_reason is None:
                    pool.step()
                if answer.error is not None:
                    raise answer.error
        return [answer.text for answer in answers]

    def _measured(self, measure: Any, texts: Any, lengths: Any, disable_tqdm: bool) -> Any:
        """What `score` or `continuations` gives, with a progress bar."""
        with tqdm(total=sum(n - 1 for n in lengths), unit=" tokens", disable=disable_tqdm) as bar:
            return measure(
                *(self._module, self._params, texts),
                batch=self._batch,
                chunk_size=self._chunk_size,
                progress=bar.update,
                **self._options,
            )

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not continuation:
            raise ValueError("rwkv_jax: a continuation is empty; accepted is some text")
        before = self._tokenizer.encode(context.rstrip())
        whole = self._tokenizer.encode(context + continuation)
        common = sum(itertools.takewhile(bool, map(operator.eq, before, whole)))
        return self._begun(whole[:common]), whole[common:]

    def _begun(self, tokens: list[int]) -> list[int]:
        """The tokens of a context with what comes before them.

        Raises:
          ValueError: there is no token at all.
        """
        end = self._tokenizer.end_of_text
        if end is not None and (self._bos or not tokens):
            return [end, *tokens]
        if not tokens:
            raise ValueError(
                f"rwkv_jax: a context is empty, and the tokenizer {self._tokenizer.name} has no "
                "token for the end of a text; accepted is some text"
            )
        return tokens

    def _submitted(self, pool: Pool, seed: int, context: str, settings: dict[str, Any]) -> Request:
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings, self._max_gen_toks))
        stop = [x for x in handle_stop_sequences(given.pop("until"), None) if x]
        length, samples = given.pop("max_gen_toks"), given.pop("do_sample")
        if given.get("num_beams") == 1:
            del given["num_beams"]
        if unknown := sorted(given.keys() - set(_SAMPLING)):
            raise ValueError(
                f"rwkv_jax: a request has the settings {', '.join(unknown)}; accepted are until, "
                f"max_gen_toks, do_sample, {', '.join(_SAMPLING)}"
            )
        end = self._tokenizer.end_of_text
        return pool.submit(
            *(self._begun(self._tokenizer.encode(context)), length),
            sampling=Sampling(**given) if samples else Sampling(temperature=0),
            seed=seed,
            stop_tokens=() if end is None else (end,),
            stop=stop,
        )


register_model("rwkv_jax")(Model)

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
