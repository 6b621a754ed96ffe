"""Generation of tokens and of text with the language models of `rwkv_jax.models`.

`generate` reads prompts and gives the tokens that follow them, `TokenStream` gives them as they
come, and `TextStream` makes text of them and looks for stop strings. `Sampling` says how a token is
chosen. A `Session` is all that a later call needs to continue; `save` and `load` keep it on disk.

Three kinds of programs are compiled for a model and a number of rows, whatever the lengths of
prompts, the settings and the seeds are: the start of a session, one that reads a chunk of the
prompts for each length of chunks, and one that samples and reads tokens of each row.
"""

from rwkv_jax.generation._files import load as load
from rwkv_jax.generation._files import save as save
from rwkv_jax.generation._log_probs import LogProbs as LogProbs
from rwkv_jax.generation._prefill import PREFILL_CHUNKS as PREFILL_CHUNKS
from rwkv_jax.generation._sampling import Sampling as Sampling
from rwkv_jax.generation._session import Session as Session
from rwkv_jax.generation._streaming import Generated as Generated
from rwkv_jax.generation._streaming import TokenStream as TokenStream
from rwkv_jax.generation._streaming import generate as generate
from rwkv_jax.generation._text import TextStream as TextStream
