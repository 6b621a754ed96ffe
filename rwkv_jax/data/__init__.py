"""Documents to train on, and batches of rows in which they are packed.

A `Source` gives documents by number: `Text` and `JsonLines` from files of text, and `BinIdx` from
the tokens of RWKV-LM and Megatron. Nothing else of their files is in memory than where documents
begin. `split` holds documents out, and `training_batches` and `validation_batches` pack those of
several sources into rows. Any other object with `__len__` and `__getitem__` is a source as well.
"""

from rwkv_jax.data._batch import Batch as Batch
from rwkv_jax.data._batch import Batches as Batches
from rwkv_jax.data._batches import training_batches as training_batches
from rwkv_jax.data._batches import validation_batches as validation_batches
from rwkv_jax.data._bin_idx import BinIdx as BinIdx
from rwkv_jax.data._bin_idx import write_bin_idx as write_bin_idx
from rwkv_jax.data._documents import Document as Document
from rwkv_jax.data._documents import FileSource as FileSource
from rwkv_jax.data._documents import SizedSource as SizedSource
from rwkv_jax.data._documents import Source as Source
from rwkv_jax.data._json_lines import JsonLines as JsonLines
from rwkv_jax.data._split import split as split
from rwkv_jax.data._text import Text as Text
