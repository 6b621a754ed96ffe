"""Training with a checkout of RWKV-LM: the code in its folder `RWKV-v7/train_temp`, on one GPU.

torch compiles its CUDA kernels as the code asks for, which needs nvcc and ninja. It imports
pytorch_lightning and deepspeed, which small modules stand in for. What the two do in its training
on one GPU is done here: parameters and gradients in bfloat16, clipping of gradients, and AdamW.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import jax
import numpy as np

from benchmarking import official_float32
from benchmarking.model_step import Figures, Row, Settings
from rwkv_jax._training.sizes import flops_per_token
from rwkv_jax.models import rwkv7

HEAD_SIZE = 64
"""The only head size of its kernels."""

WARM_UP = 5
"""Steps before the first one that is timed. TorchScript compiles anew in the first ones."""

OPTIONS: Mapping[str, str] = {
    "kernel": "@rwkv3",
    "head_chunk": "0",
    "grad_cp": "0",
    "jit": "1",
    "dtype": "bfloat16",
}
"""Its options that may be chosen: the kernel of the operator, the number of tokens whose logits
exist at a time (0 for all), 1 to compute blocks again in the backward pass, 1 for TorchScript, and
the dtype. With float32 the formulas of `official_float32` take the place of its kernels, which are
for bfloat16, and nothing is computed in TF32. The values are those for the greatest speed."""

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Hyperparameters:
    """How to train. The learning rate rises for `warmup` steps and falls as a cosine until the last
    of `steps` steps."""

    learning_rate: float = 6e-4
    final_learning_rate: float = 3e-5
    warmup: int = 10
    steps: int = 1000
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclass(frozen=True)
class Checkout:
    """Its two modules: the model, and the callback that sets learning rates."""

    model: ModuleType
    trainer: ModuleType


def _module(name: str) -> Any:
    """A module of torch, which only this part of the benchmarks needs."""
    return importlib.import_module(name)


def folder_of(path: Path) -> Path:
    """The folder of the training code in a checkout, or `path` if it is that folder.

    Raises:
      FileNotFoundError: the code is in neither.
    """
    for folder in (path, path / "RWKV-v7" / "train_temp"):
        if (folder / "src" / "model.py").is_file():
            return folder.resolve()
    raise FileNotFoundError(
        f"neither {path} nor its RWKV-v7/train_temp has src/model.py; accepted is a checkout of "
        "https://github.com/BlinkDL/RWKV-LM"
    )


def options_of(given: Mapping[str, str]) -> dict[str, str]:
    """`OPTIONS` with the values that are given.

    Raises:
      ValueError: there is no such option, or no such dtype.
    """
    for name in given:
        if name not in OPTIONS:
            raise ValueError(f"the official code has no {name!r} here; accepted are {[*OPTIONS]}")
    options = {**OPTIONS, **given}
    if options["dtype"] not in DTYPES:
        raise ValueError(f"dtype is {options['dtype']!r}; accepted are {DTYPES}")
    if options["dtype"] == "float32" and options["head_chunk"] != "0":
        raise ValueError(
            f"head_chunk is {options['head_chunk']!r}; accepted with dtype=float32 is '0'"
        )
    return options


def _fused_adam(groups: Any, *, lr: float, betas: Any, eps: float, **options: Any) -> Any:
    """torch's fused AdamW in place of that of deepspeed."""
    torch = _module("torch")
    decay = options.get("weight_decay", 0.0)
    if decay and not options.get("adam_w_mode", True):
        raise ValueError("the official code asks for Adam with L2 regularisation, not for AdamW")
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=decay, fused=True)


def stand_ins() -> dict[str, ModuleType]:
    """Modules with the names that the code imports from pytorch_lightning and deepspeed."""
    torch, recomputing = _module("torch"), _module("torch.utils.checkpoint")

    def checkpoint(function: Callable[..., Any], *arguments: Any) -> Any:
        return recomputing.checkpoint(function, *arguments, use_reentrant=True)

    contents: dict[str, dict[str, Any]] = {
        "pytorch_lightning": {"LightningModule": torch.nn.Module, "Callback": object},
        "pytorch_lightning.utilities": {
            "rank_zero_info": print,
            "rank_zero_only": lambda function: function,
        },
        "pytorch_lightning.strategies": {"DeepSpeedStrategy": type("DeepSpeedStrategy", (), {})},
        "deepspeed": {"checkpointing": SimpleNamespace(checkpoint=checkpoint)},
        "deepspeed.ops": {},
        "deepspeed.ops.adam": {"FusedAdam": _fused_adam, "DeepSpeedCPUAdam": _fused_adam},
    }
    modules = {}
    for name, attributes in contents.items():
        modules[name] = ModuleType(name)
        modules[name].__spec__ = ModuleSpec(name, None)  # importlib.util.find_spec asks for it
        vars(modules[name]).update(attributes)
    return modules


@contextlib.contextmanager
def prepared(path: Path, options: Mapping[str, str], context: int) -> Iterator[Path]:
    """The state of the process in which the code can be imported: its folder, environment variables
    and stand-ins for modules, which stay."""
    folder = folder_of(path)
    sys.modules.update(stand_ins())
    environment = {
        "RWKV_MY_TESTING": "x070",
        "RWKV_KERNEL": options["kernel"],
        "RWKV_CTXLEN": str(context),
        "RWKV_HEAD_SIZE": str(HEAD_SIZE),
        "RWKV_HEAD_L2WRAP_CE_CHUNK": options["head_chunk"],
        "RWKV_FLOAT_MODE": "bf16",
        "RWKV_JIT_ON": options["jit"],
    }
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(folder),  # it names its CUDA sources from there
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield folder


def without_kernels() -> tuple[ModuleType, list[dict[str, Any]]]:
    """The module of its model, imported without compiling anything, and the arguments of each call
    of `torch.utils.cpp_extension.load` in it. Needs `prepared`."""
    torch, cpp_extension = _module("torch"), _module("torch.utils.cpp_extension")
    found: list[dict[str, Any]] = []
    with (
        mock.patch.object(cpp_extension, "load", lambda **given: found.append(given)),
        mock.patch.object(torch.library, "register_autograd"),
        mock.patch.object(torch.jit, "script", lambda function: function),
        mock.patch.dict(os.environ, RWKV_JIT_ON="0"),
    ):
        model = importlib.import_module("src.model")
    return model, found


def load(path: Path, options: Mapping[str, str], context: int) -> Checkout:
    """Its modules, with all kernels for bfloat16 compiled if that is the dtype.

    Raises:
      FileNotFoundError: there is no such code at `path`.
      RuntimeError: torch finds no GPU, no nvcc or no ninja, or a kernel does not compile.
    """
    torch, cpp_extension = _module("torch"), _module("torch.utils.cpp_extension")
    if not torch.cuda.is_available():
        raise RuntimeError("the official kernels need a GPU, and torch finds none")
    if cpp_extension.CUDA_HOME is None:
        raise RuntimeError("the official kernels need nvcc; set CUDA_HOME to its installation")
    if not cpp_extension.is_ninja_available():
        raise RuntimeError("the official kernels need ninja, which torch compiles them with")
    exact = options["dtype"] == "float32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not exact
    torch.backends.cudnn.benchmark = True

    def build(given: dict[str, Any]) -> Any:
        return cpp_extension.load(**{**given, "verbose": False})

    with prepared(path, options, context) as folder:
        model, found = without_kernels()
        if exact:
            official_float32.put_in(model, official_float32.functions(folder, HEAD_SIZE))
            return Checkout(model, importlib.import_module("src.trainer"))
        for name in ("src.model", "src"):
            del sys.modules[name]
        with ThreadPoolExecutor() as pool:  # its own calls would compile one after another
            built = {x["name"]: y for x, y in zip(found, pool.map(build, found), strict=True)}
        with mock.patch.object(cpp_extension, "load", lambda **given: built[given["name"]]):
            modules = map(importlib.import_module, ("src.model", "src.trainer"))
            return Checkout(*modules)


def arguments(
    row: Row,
    tokens: int,
    vocabulary: int,
    options: Mapping[str, str],
    training: Hyperparameters,
) -> argparse.Namespace:
    """What its train.py makes of its command line."""
    return argparse.Namespace(
        n_layer=row.layers,
        n_embd=row.width,
        dim_att=row.width,
        dim_ffn=row.width * 4,
        vocab_size=vocabulary,
        ctx_len=tokens,
        head_size=HEAD_SIZE,
        my_testing="x070",
        grad_cp=int(options["grad_cp"]),
        lr_init=training.learning_rate,
        lr_final=training.final_learning_rate,
        warmup_steps=training.warmup,
        my_exit_tokens=training.steps * row.batch * tokens,
        weight_decay=training.weight_decay,
        betas=(0.9, 0.99),
        adam_eps=1e-18,
        grad_clip=training.clip,
        real_bsz=row.batch,
        epoch_begin=0,
        epoch_steps=training.steps,
        strategy="",
        accelerator="GPU",
    )


def make_model(checkout: Checkout, args: argparse.Namespace) -> Any:
    """Its model in float32 on the CPU, with what its methods ask of a trainer."""
    with contextlib.redirect_stdout(sys.stderr):
        model = checkout.model.RWKV(args)
    model.trainer = SimpleNamespace(is_global_zero=False, strategy=None, global_step=0)
    return model


def measure(row: Row, settings: Settings, path: Path, given: Mapping[str, str]) -> list[Figures]:
    """The figures of a training step of one row, and of the forward pass if it is asked for, as
    `model_step.measure` gives them. The parameters and their moments have the dtype of the options,
    bfloat16 if none is given."""
    torch = _module("torch")
    jax.config.update("jax_platforms", "cpu")  # counts operations only
    config = rwkv7.Config(row.layers, row.width, vocab_size=settings.vocabulary)
    shapes = jax.eval_shape(lambda: rwkv7.init(jax.random.key(0), config))
    flops = flops_per_token(shapes) * row.batch * settings.tokens
    options, training = options_of(given), Hyperparameters()
    start = time.perf_counter()
    checkout = load(path, options, settings.tokens)
    about = {
        **row._asdict(),
        "implementation": "official",
        "official_options": options,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "build_s": time.perf_counter() - start,
    }

    args = arguments(row, settings.tokens, settings.vocabulary, options, training)
    model = make_model(checkout, args).to("cuda", getattr(torch, options["dtype"]))
    torch.manual_seed(0)
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 2 and not x.any():  # products with zeros take less power
                x.normal_(std=x.shape[-1] ** -0.5)
    optimizer = model.configure_optimizers()
    shape = row.batch, settings.tokens + 1
    tokens = torch.randint(settings.vocabulary, shape, device="cuda")
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        loss = model.training_step(batch, 0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip)
        optimizer.step()
        return loss

    def forward() -> Any:
        with torch.no_grad():
            return model.training_step(batch, 0)

    def timed(call: Callable[[], Any], flops: float) -> Figures:
        for _ in range(WARM_UP):
            call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss: Any = None
        times = []
        for _ in range(settings.repeats):
            start = time.perf_counter()
            for _ in range(settings.steps):
                loss = call()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / settings.steps)
        median = statistics.median(times)
        return {
            "ms": 1e3 * median,
            "best_ms": 1e3 * min(times),
            "tokens_per_second": row.batch * settings.tokens / median,
            "share_of_peak": flops / median / settings.peak,
            "peak_bytes": torch.cuda.max_memory_allocated(),
            "loss": float(loss),
        }

    figures = [{**about, "pass": "training, official", **timed(step, flops)}]
    if settings.forward:
        optimizer.zero_grad(set_to_none=True)
        figures.append({**about, "pass": "forward, official", **timed(forward, flops / 3)})
    return figures


def set_weights(model: Any, weights: Mapping[str, np.ndarray]) -> None:
    """Set the parameters by their names. Vectors get the leading axes of size 1 that they have in
    the model. The first block keeps its `v0`, `v1` and `v2`, which it does not use.

    Raises:
      ValueError: a name or a shape is not that of the model.
    """
    torch = _module("torch")
    state = model.state_dict()
    unused = {f"blocks.0.att.v{i}" for i in range(3)}
    if state.keys() - unused != weights.keys() - unused:
        names = sorted((state.keys() - unused) ^ (weights.keys() - unused))
        raise ValueError(f"the official model and these weights do not both have {names}")
    with torch.no_grad():
        for name, value in weights.items():
            shape = tuple(state[name].shape)
            if tuple(n for n in shape if n > 1) != tuple(n for n in value.shape if n > 1):
                raise ValueError(
                    f"{name} has shape {shape} in the official model, {value.shape} here"
                )
            state[name].copy_(torch.from_numpy(np.array(value, np.float32)).reshape(shape))


def losses(
    row: Row,
    path: Path,
    given: Mapping[str, str],
    training: Hyperparameters,
    vocabulary: int,
    weights: Mapping[str, np.ndarray],
    batches: Sequence[np.ndarray],
) -> list[float]:
    """The losses of training on each of the batches [B, T + 1], from the weights by their names.

    As deepspeed does on one GPU, the optimizer has float32 copies of bfloat16 parameters, and
    gradients in float32 that are divided by (norm + 1e-6) / clip where that is above 1. The
    official callback sets the learning rates before each step.
    """
    torch = _module("torch")
    options, tokens = options_of(given), batches[0].shape[1] - 1
    checkout = load(path, options, tokens)
    args = arguments(row, tokens, vocabulary, options, training)
    model = make_model(checkout, args)
    set_weights(model, weights)
    model = model.to("cuda", getattr(torch, options["dtype"]))
    optimizer = model.configure_optimizers()
    pairs = []
    for group in optimizer.param_groups:
        own = [torch.nn.Parameter(x.detach().float()) for x in group["params"]]
        pairs += zip(group["params"], own, strict=True)
        group["params"] = own
    callback = checkout.trainer.train_callback(args)
    trainer = model.trainer
    trainer.optimizers = [optimizer]

    found = []
    for step, batch in enumerate(batches):
        trainer.global_step = step
        callback.on_train_batch_start(trainer, model, None, step)
        on_device = torch.from_numpy(np.asarray(batch, np.int64)).cuda()
        model.zero_grad(set_to_none=True)
        loss = model.training_step(
            (on_device[:, :-1].contiguous(), on_device[:, 1:].contiguous()), step
        )
        loss.backward()
        with torch.no_grad():
            gradients = [x.grad.float() for x, _ in pairs if x.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
            scale = ((norm + 1e-6) / training.clip).clamp(min=1.0)
            for x, own in pairs:
                own.grad = None if x.grad is None else x.grad.float() / scale
            optimizer.step()
            for x, own in pairs:
                x.copy_(own)
        found.append(loss.detach().float())
    return [float(loss) for loss in found]
