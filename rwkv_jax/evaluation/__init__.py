"""How well a language model predicts texts.

`evaluate` gives the losses of a model on one text, by the position in the context, and `score` the
log probability of each token of many documents. `lambada` and `passkey` are tasks on top of
`score`. `rwkv_jax.evaluation.lm_eval` is the model `rwkv_jax` of lm-evaluation-harness, which
`pip install 'rwkv-jax[lm-eval]'` installs.
"""

from rwkv_jax.evaluation._lambada import LastWords as LastWords
from rwkv_jax.evaluation._lambada import lambada as lambada
from rwkv_jax.evaluation._lambada import read_lambada as read_lambada
from rwkv_jax.evaluation._passkey import Found as Found
from rwkv_jax.evaluation._passkey import passkey as passkey
from rwkv_jax.evaluation._scores import Score as Score
from rwkv_jax.evaluation._scores import score as score
from rwkv_jax.evaluation._windows import Bucket as Bucket
from rwkv_jax.evaluation._windows import Evaluation as Evaluation
from rwkv_jax.evaluation._windows import evaluate as evaluate
