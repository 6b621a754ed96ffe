"""Formulas in PyTorch for what RWKV-LM's training code computes with kernels for bfloat16 alone.

With these functions in the place of its own, that code trains in float32. They are written from the
definitions of RWKV-7 (arXiv:2503.14456, section 4). `wkv7` alone has a kernel, which is one of that
code for float32.
"""

import functools
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

EPS = 64e-5
"""Of the group norm of the output of `wkv7`."""

CHUNK = 16
"""The kernel of `wkv7` keeps the state after as many tokens each."""


def functions(folder: Path, head_size: int, l2_wrap: float = 1e-4) -> dict[str, Any]:
    """Functions by the names that they have in the module of the official model. `folder` has the
    sources of the kernel, which is compiled in the first call."""
    torch = importlib.import_module("torch")
    plain = torch.nn.functional

    def heads(x: Any) -> Any:
        return x.unflatten(-1, (-1, head_size))

    def mixed(x: Any, *shares: Any) -> tuple[Any, ...]:
        before = plain.pad(x, (0, 0, 1, -1))
        return tuple(torch.lerp(x, before, share.expand_as(x)) for share in shares)

    def rate(bias: Any, x: Any) -> Any:
        return torch.sigmoid(bias + x)

    def value(v: Any, first: Any, bias: Any, x: Any) -> Any:
        return torch.lerp(v, first, rate(bias, x))

    def keys(k: Any, k_k: Any, rate: Any, k_a: Any) -> tuple[Any, Any, Any]:
        unit = plain.normalize(heads(k * k_k), dim=-1).flatten(-2)
        return k + k * k_a * (rate - 1), -unit, unit * rate

    def read_out(
        y: Any, r: Any, k: Any, v: Any, r_k: Any, weight: Any, bias: Any, gate: Any
    ) -> Any:
        normal = plain.group_norm(y.flatten(0, 1), len(r_k), weight, bias, EPS).view_as(y)
        bonus = torch.einsum("...hk,...hk,hk->...h", heads(r), heads(k), r_k)
        return gate * (normal + (heads(v) * bonus[..., None]).flatten(-2))

    def feed_forward(x: Any, share: Any, key: Any, value: Any) -> Any:
        (x,) = mixed(x, share)
        return plain.linear(plain.linear(x, key).relu().square(), value)

    def loss(logits: Any, targets: Any) -> Any:
        """The gradient of the largest logit of a token has `l2_wrap` times that logit more."""
        largest = logits.max(-1).values
        more = l2_wrap / 2 * largest.square().mean()
        return plain.cross_entropy(logits.flatten(0, -2), targets.flatten()) + more - more.detach()

    operator = _operator(folder, head_size)

    def wkv7(r: Any, w: Any, k: Any, v: Any, a: Any, b: Any) -> Any:
        w = -plain.softplus(-w) - 0.5  # the decay is exp(-exp(w))
        return operator(*(heads(x).contiguous() for x in (w, r, k, v, a, b))).flatten(-2)

    class FeedForward:
        apply = staticmethod(feed_forward)

    return {
        "tmix_mix6_bf16_v5": mixed,
        "tmix_a_gate_bf16": rate,
        "tmix_vres_gate_bf16_v3": value,
        "tmix_kk_pre_bf16_v5": keys,
        "tmix_lnx_rkvres_xg_bf16_v1": read_out,
        "_CmixLayerV2Fn": FeedForward,
        "l2wrap_cross_entropy": loss,
        "RWKV7_CLAMPW_CUDA": wkv7,
    }


def _operator(folder: Path, head_size: int) -> Callable[..., Any]:
    """`wkv7` of [B, T, H, K], with T a multiple of `CHUNK`, by the official kernel for float32."""
    torch: Any = importlib.import_module("torch")

    @functools.cache
    def kernels() -> Any:
        cpp_extension = importlib.import_module("torch.utils.cpp_extension")
        sources = [str(folder / "cuda" / x) for x in ("wkv7_cuda_fp32.cu", "wkv7_op_fp32.cpp")]
        flags = [f"-D_C_={head_size}", f"-D_CHUNK_LEN_={CHUNK}", "-O3"]
        cpp_extension.load(
            "wind_backstepping", sources, extra_cuda_cflags=flags, is_python_module=False
        )
        return torch.ops.wind_backstepping

    class Operator(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, *operands: Any) -> Any:
            rows, tokens, heads, size = operands[0].shape
            y, saved = torch.empty_like(operands[0]), torch.empty_like(operands[0])
            states = y.new_empty(rows, heads, tokens // CHUNK, size, size)
            kernels().forward(*operands, y, states, saved)
            context.save_for_backward(*operands, states, saved)
            return y

        @staticmethod
        def backward(context: Any, dy: Any) -> tuple[Any, ...]:
            *operands, states, saved = context.saved_tensors
            gradients = tuple(torch.empty_like(x) for x in operands)
            kernels().backward(*operands, dy.contiguous(), states, saved, *gradients)
            return gradients

    return Operator.apply


def put_in(module: Any, replacements: Mapping[str, Any]) -> None:
    """Set what a module has by these names.

    Raises:
      ValueError: it lacks one of them.
    """
    if lacking := [name for name in replacements if not hasattr(module, name)]:
        raise ValueError(f"the official model has no {lacking}; its code is not the one known here")
    vars(module).update(replacements)
