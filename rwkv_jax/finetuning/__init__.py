"""Finetuning of models of RWKV-4 to 7: what is trained beside parameters that stay as they are.

An `Adapter` is LoRA or DoRA: matrices of low rank beside chosen matrices of a model. `adapted`
puts it into the parameters that the functions of the model take, and `merge` adds it to them.
`save_adapter` and `load_adapter` write and read the folders of PEFT, and `load_rwkv_peft` reads the
files of RWKV-PEFT. `initial_states` are trainable states before the first token, and `state_of` is
the state of the model with them. `labels`, `split` and `join` say what of any such tree is trained.
"""

from rwkv_jax.finetuning._adapter import TARGETS as TARGETS
from rwkv_jax.finetuning._adapter import Adapter as Adapter
from rwkv_jax.finetuning._adapter import LowRank as LowRank
from rwkv_jax.finetuning._adapter import adapted as adapted
from rwkv_jax.finetuning._adapter import init_adapter as init_adapter
from rwkv_jax.finetuning._adapter import merge as merge
from rwkv_jax.finetuning._files import load_adapter as load_adapter
from rwkv_jax.finetuning._files import save_adapter as save_adapter
from rwkv_jax.finetuning._partition import FROZEN as FROZEN
from rwkv_jax.finetuning._partition import join as join
from rwkv_jax.finetuning._partition import labels as labels
from rwkv_jax.finetuning._partition import split as split
from rwkv_jax.finetuning._rwkv_peft import load_rwkv_peft as load_rwkv_peft
from rwkv_jax.finetuning._states import average as average
from rwkv_jax.finetuning._states import initial_states as initial_states
from rwkv_jax.finetuning._states import state_of as state_of
