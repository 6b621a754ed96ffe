"""RWKV time-mixing operators for JAX.

The operators are `wkv4`, `wkv5`, `wkv6` and `wkv7`, and of the delta-rule family
`gated_delta_rule` and `kimi_delta_attention`; `wkv7_step` and its like compute one token.
`implementations` says which implementation of an operator can run a given call. `build_info` says
how the native kernels of this installation were built. `rwkv_jax.sharding` runs the operators on
many devices. `rwkv_jax.models` has the language models of RWKV-4 to 7 and reads their checkpoints,
`rwkv_jax.nn` has them as layers, `rwkv_jax.losses` computes their loss, and `rwkv_jax.finetuning`
has adapters and trainable states for them. `rwkv_jax.tokenizers` makes tokens of text,
`rwkv_jax.generation` continues them with a model, and `rwkv_jax.evaluation` says how well a model
predicts a text.

# Arguments that all operators share

The axes have these letters: B rows of a batch, T tokens, H heads, K key channels and V value
channels of a head, C channels (of `wkv4`), G heads of keys that several heads of values share, S
sequences of `cu_seqlens`.

**Inputs.** All inputs of a call share one dtype: float32, bfloat16 or float16. (`g` and `beta` may
be float32 beside others of 16 bits.) States are always float32, and so is all accumulation. `y` has
the dtype of `v`. B, T, H and C may be 0.

**`initial_state`** is the state before the first token of each row. If it is None, the operator
starts from the state of no tokens, which is zero for all but `wkv4`.

**`segment_ids`**, integers [B, T], say which tokens of a row belong together. A segment is a run of
tokens with the same id; the id 0 is padding. The first segment of a row continues from
`initial_state`. Every other segment starts from the state of no tokens. The final state is the
state after the last segment. Padding changes no state, and its `y` and its gradients are 0.

**`active`**, booleans [B], says which rows of a step have a token. The `y` and the gradients of the
others are 0, and their states stay as they are.

**`cu_seqlens`**, int32 [S + 1], is for S sequences of different lengths that lie one after another
in a single row, so B is 1. The sequence s has the tokens from `cu_seqlens[s]` up to, but without,
`cu_seqlens[s + 1]`; it is empty if the two are equal. Every sequence has a state of its own, so
`initial_state` and the final state have S in place of B. Offsets that do not go from 0 to T, or
that decrease, raise a ValueError where their values are known when the call is traced. Otherwise
they are clamped, and tokens of no sequence have a `y` and gradients of 0. `cu_seqlens` and
`segment_ids` exclude each other.

**`decay`** names the form in which `w` gives the decay; the docstring of each operator lists its
forms. There is no default. Any finite `w` is accepted. In `wkv5`, `wkv6` and `wkv7` a decay that
underflows to 0 clears its channel of the state.

**`precision`** is a `jax.lax.Precision` or one of its names. "highest" computes in float32
throughout. The default may use matrix units in lower precision with float32 accumulation. `wkv4`
always computes in float32.

**`implementation`** is the name of one implementation: "ffi" (native kernels on CPU and CUDA),
"pallas" (Pallas kernels on CUDA and TPU; not for `wkv4`), "xla" (chunks in plain `jax.numpy`) or
"reference" (one `lax.scan` step for each token, differentiable any number of times and in forward
mode). None takes the first of "ffi", "pallas" (on CUDA alone) and "xla" that can run where the
program is lowered.

**Errors.** An argument that is not an array, or that has a dtype that is not accepted or not
shared, raises a TypeError. A wrong rank or size, and an unknown option, raise a ValueError. An
implementation that is asked for by name and cannot run the call raises a NotImplementedError that
says why. If only the platform is at fault, the error comes when the program is lowered.
"""

from rwkv_jax import sharding as sharding
from rwkv_jax._info import Availability as Availability
from rwkv_jax._info import build_info as build_info
from rwkv_jax._info import export_disabled_checks as export_disabled_checks
from rwkv_jax._info import implementations as implementations
from rwkv_jax._native import library as _library
from rwkv_jax.gated_delta_rule import gated_delta_rule as gated_delta_rule
from rwkv_jax.gated_delta_rule import gated_delta_rule_step as gated_delta_rule_step
from rwkv_jax.kimi_delta_attention import kimi_delta_attention as kimi_delta_attention
from rwkv_jax.kimi_delta_attention import kimi_delta_attention_step as kimi_delta_attention_step
from rwkv_jax.wkv4 import Wkv4State as Wkv4State
from rwkv_jax.wkv4 import wkv4 as wkv4
from rwkv_jax.wkv4 import wkv4_step as wkv4_step
from rwkv_jax.wkv5 import wkv5 as wkv5
from rwkv_jax.wkv5 import wkv5_step as wkv5_step
from rwkv_jax.wkv6 import wkv6 as wkv6
from rwkv_jax.wkv6 import wkv6_step as wkv6_step
from rwkv_jax.wkv7 import wkv7 as wkv7
from rwkv_jax.wkv7 import wkv7_step as wkv7_step

__version__ = _library.VERSION
