"""RWKV language models as functions of parameter trees; `rwkv_jax.nn` wraps them as layers.

Each generation is a module. What the generations share is in the private modules beside them.
`load` reads a checkpoint and finds out its generation, `inspect` does so without the values of the
parameters, and `save` writes a checkpoint. `load_state` and `save_state` read and write the states
of state tuning. `quantize` makes weights of 8 bits, and
`for_decoding` stores weights as decoding reads them with the fewest bytes. `Kernels` says which
kernels compute a model. `Invariant` is a model whose results for a sequence have the same bits in
any batch and in any prefill chunks.
"""

from rwkv_jax.models import _serialization
from rwkv_jax.models import rwkv4 as rwkv4
from rwkv_jax.models import rwkv5 as rwkv5
from rwkv_jax.models import rwkv6 as rwkv6
from rwkv_jax.models import rwkv7 as rwkv7
from rwkv_jax.models._checkpoints.loading import Checkpoint as Checkpoint
from rwkv_jax.models._checkpoints.loading import inspect as inspect
from rwkv_jax.models._checkpoints.loading import load as load
from rwkv_jax.models._checkpoints.loading import load_state as load_state
from rwkv_jax.models._checkpoints.saving import save as save
from rwkv_jax.models._checkpoints.saving import save_state as save_state
from rwkv_jax.models._decoding import for_decoding as for_decoding
from rwkv_jax.models._invariant import Invariant as Invariant
from rwkv_jax.models._kernels import Kernels as Kernels
from rwkv_jax.models._quantisation import quantize as quantize

_serialization.register()
