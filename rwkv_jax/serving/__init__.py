"""Serving: a batch whose sequences come and go, with the models of all generations.

A `Pool` has a fixed number of slots, each with the state of one sequence. `Pool.submit` takes a
prompt and returns a `Request`, whose tokens and text come while others are decoded in the other
slots. Prompts are read in chunks between the tokens of running requests, and the states after
chunks are kept for other prompts that begin with them.

Four kinds of programs are compiled for a pool, whatever comes and goes: one that gives a slot to a
request, one that reads chunks of prompts for each length of chunks, one that decodes tokens of all
slots, and one that copies a state for the cache.
"""

from rwkv_jax.serving._pool import Pool as Pool
from rwkv_jax.serving._request import Request as Request
from rwkv_jax.serving._scheduler import Totals as Totals
