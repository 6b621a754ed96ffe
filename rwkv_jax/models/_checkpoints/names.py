"""The official names of tensors, from those that training and other programs give them."""

import re
from collections.abc import Mapping

from rwkv_jax.models._checkpoints import fla, hugging_face
from rwkv_jax.models._checkpoints.tensors import Tensor, quoted

_PREFIX = re.compile(
    r"^(?:(?:_orig_mod|_forward_module|_fsdp_wrapped_module|module|base_model|model|rwkv7?)\.)+"
)
"""What `torch.compile`, Lightning, DeepSpeed, DistributedDataParallel, PEFT and the models of
Hugging Face put before names."""
_WITHIN = re.compile(r"(?<=\.)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""What wrappers of blocks put within names."""
_ADAPTER = re.compile(r"\.(?:lora_(?:embedding_)?[AB]|lora_magnitude_vector|bone|disha)(?:\.|$)")
"""Names of the parameters of LoRA, DoRA, Bone and DiSHA in PEFT and RWKV-PEFT."""


def by_official_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their official names, in the official layout. Names of no model of RWKV stay
    as they are but for prefixes.

    Raises:
      ValueError: the tensors are an adapter, two have the same official name, or
        flash-linear-attention has another formula for the model.
    """
    found: dict[str, Tensor] = {}
    for given, x in tensors.items():
        what = f"{x.file}: {quoted(given)}"
        if _ADAPTER.search(given):
            raise ValueError(
                f"{what} is of an adapter (LoRA and the like), which is no model by itself; "
                "accepted is the model that merging the adapter with its base gives, as "
                "`rwkv-jax merge` and merge_and_unload of PEFT do"
            )
        bare = _bare(given)
        of_fla = fla.official_name(bare)
        if of_fla is not None:
            official = fla.to_official(what, of_fla, x)
        else:
            official = {hugging_face.official_name(bare): x}
        for name, tensor in official.items():
            if name in found:
                raise ValueError(f"{what} is a second tensor with the official name {quoted(name)}")
            found[name] = tensor
    return found


def is_of_fla(given: str) -> bool:
    """Whether a name is one of flash-linear-attention."""
    return fla.official_name(_bare(given)) is not None


def official_name(given: str) -> str:
    """The official name of a tensor, whose layout may be another one. A name of no model of RWKV
    stays as it is but for prefixes."""
    bare = _bare(given)
    return fla.official_name(bare) or hugging_face.official_name(bare)


def _bare(given: str) -> str:
    """A name without what training leaves in it."""
    return _WITHIN.sub("", _PREFIX.sub("", given))
