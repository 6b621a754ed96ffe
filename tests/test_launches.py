"""What CUDA kernels are launched with and what they write: on many devices, for every number of
rows, and for more tokens than a test has memory for.

A call of a target is traced for shapes alone. Then its handler launches the kernels for one device
after another. Either no kernel runs, and the emulation refuses what a GPU would refuse; or the
kernels run on random operands, and a row has the results that it has among other rows.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rwkv_jax.models import rwkv7
from support import internals, layer_functions, models, tolerance
from support.cases import DTYPES, GPUS
from support.emulation import DEVICES, Call, Device, Emulation, needs_emulation
from support.layer_functions import ELEMENTWISE
from support.operators import OPERATORS

pytestmark = [needs_emulation, pytest.mark.slow]

SHARED_MEMORY = sorted({shared_memory for _, shared_memory in GPUS.values()})
MULTIPROCESSORS = sorted({46, 58, 114, 160, 200, *(count for count, _ in GPUS.values())})

EVERY_DEVICE = [
    Device(count, shared_memory, hopper=shared_memory == SHARED_MEMORY[-1] and count <= 132)
    for count, shared_memory in itertools.product(MULTIPROCESSORS, SHARED_MEMORY)
]
HOPPER = [device for device in EVERY_DEVICE if device.hopper]

Sizes = dict[str, Any]

EMULATED_LAYERS = (*ELEMENTWISE, "keyed_wkv7")


def _operator_calls(emulation: Emulation, op: str, sizes: Sizes, dtype: str) -> list[Call]:
    """The calls of the forward and the backward pass."""
    operator, axes = OPERATORS[op], internals.axes_of_arguments(op)
    sizes = {"V": sizes["K"], "C": sizes["H"] * sizes["K"], **sizes}

    def shape(name: str) -> jax.ShapeDtypeStruct:
        letters = axes.get(name, axes.get(f"state.{name}", "BC"))
        wide = "float32" if name in operator.states else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct([sizes[x] for x in letters], wide)

    def run(arrays: dict[str, Any]) -> Any:
        options = {"decay": operator.decays[-1], "implementation": "ffi"}
        found, vjp = jax.vjp(lambda floats: operator.function(**floats, **options), arrays)
        return vjp(found)

    return emulation.traced(run, {name: shape(name) for name in operator.names})


def _layer_calls(emulation: Emulation, name: str, sizes: Sizes, dtype: str) -> list[Call]:
    return emulation.of_layer(name, layer_functions.Case(**sizes, dtype=dtype))


def _block_calls(emulation: Emulation, rows: int, width: int, dtype: str) -> list[Call]:
    """The step of a block that is not the first one."""
    params = models.shapes_of(rwkv7, rwkv7.Config(2, width, vocab_size=11))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), params)
    state = jax.eval_shape(lambda p: rwkv7.initial_state(p, rows, dtype), params)
    return [emulation.of_block(params.blocks[1], state[1], rows)]


def _cross_entropy_call(tokens: int, vocabulary: int, dtype: str) -> Call:
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    operands = [floats((tokens, vocabulary)), jax.ShapeDtypeStruct((tokens,), np.int32)]
    operands += [floats((tokens,)), floats((2,))]
    results = [floats((tokens,)), jax.ShapeDtypeStruct((tokens, vocabulary), DTYPES[dtype])]
    return Call("rwkv_cross_entropy_v1", operands, results, {}, {}, None)


LARGE = [
    {"B": 1, "T": 2**21, "H": 1, "K": 16},
    {"B": 1, "T": 2**21, "H": 2, "K": 64},
    {"B": 1, "T": 2**20, "H": 64, "K": 128},
    {"B": 3, "T": 2**19 + 1, "H": 2, "K": 32},
    {"B": 100_000, "T": 1, "H": 2, "K": 64},
    {"B": 100_000, "T": 17, "H": 1, "K": 16},
    {"B": 100_000, "T": 130, "H": 12, "K": 64},
    {"B": 2, "T": 65, "H": 128, "K": 64},
    {"B": 1, "T": 1, "H": 512, "K": 16},
    {"B": 1, "T": 1000, "H": 64, "K": 128},
]
"""Long rows, many rows and wide rows."""


def _large_calls(emulation: Emulation, name: str) -> Iterator[Call]:
    several = [sizes for sizes in LARGE if sizes["T"] < 2**19 or not name.endswith("_step")]
    for sizes, dtype in itertools.product(several, ("float32", "bfloat16")):
        width = sizes["H"] * sizes["K"]
        if name in OPERATORS:
            yield from _operator_calls(emulation, name, sizes, dtype)
        elif name == "cross_entropy":
            yield _cross_entropy_call(sizes["B"] * sizes["T"], width, dtype)
        elif name != "norm_shift_mix" or width <= 4096:
            yield from _layer_calls(emulation, name, sizes, dtype)


@pytest.mark.parametrize("shared_memory", SHARED_MEMORY)
@pytest.mark.parametrize("name", [*OPERATORS, *EMULATED_LAYERS, "cross_entropy"])
def test_no_launch_beyond_what_a_gpu_takes(
    emulation: Emulation, name: str, shared_memory: int
) -> None:
    """The emulation refuses the others."""
    devices = [Device(multiprocessors, shared_memory) for multiprocessors in MULTIPROCESSORS]
    emulation.use(devices[0])
    for call, device in itertools.product(_large_calls(emulation, name), devices):
        assert emulation.launches(call, device), (call, device)


@pytest.mark.parametrize("name", EMULATED_LAYERS)
def test_a_million_tokens_have_the_kernels_of_a_few_less(emulation: Emulation, name: str) -> None:
    def files(tokens: int) -> list[list[str]]:
        sizes = {"B": 1, "T": tokens, "H": 2, "K": 64}
        calls = _layer_calls(emulation, name, sizes, "bfloat16")
        return [emulation.launches(call, DEVICES["9.0"]) for call in calls]

    emulation.use(DEVICES["9.0"])
    assert files(2**20) == files(2**20 - 16)


MANY_ROWS = (*range(1, 71), 127, 128, 129, 255, 512, 1000, 1024)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 1088, 8192])
def test_blocks_on_every_device(emulation: Emulation, width: int, dtype: str) -> None:
    """A handler refuses a launch that would index more than its scratch. More than 32 rows are for
    GPUs of compute capability 9.0, whose kernels have no emulation."""
    for rows in MANY_ROWS:
        if rows > 32 and not (emulation.on_gpu and dtype == "bfloat16"):
            break
        (call,) = _block_calls(emulation, rows, width, dtype)
        for device in EVERY_DEVICE if rows <= 32 else HOPPER:
            assert emulation.launches(call, device), (rows, device)


def _operands(call: Call) -> list[np.ndarray]:
    """Random numbers, and integers that every target takes: an id, or a class."""
    rng = np.random.default_rng(len(call.operands))
    return [
        np.ones(x.shape, x.dtype)
        if np.issubdtype(x.dtype, np.integer)
        else rng.uniform(-0.3, 0.3, x.shape).astype(x.dtype)
        for x in call.operands
    ]


def _sliced(x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return np.ascontiguousarray(x[tuple(map(slice, shape))])


def _check_rows(
    emulation: Emulation,
    calls_of: Callable[[int], list[Call]],
    rows: Sequence[int],
    limit: float,
    devices: Sequence[Device] = EVERY_DEVICE,
) -> None:
    """With any number of rows, each on another device, a row has the results that it has with the
    most rows on an H100. Results that are not written are NaN."""
    emulation.use(DEVICES["9.0"])
    of_most = [(call, _operands(call)) for call in calls_of(rows[-1])]
    expected = [emulation.run(call, operands, DEVICES["9.0"]) for call, operands in of_most]
    for count in rows:
        device = devices[5 * count % len(devices)]
        calls = calls_of(count)
        for call, (_, operands), right in zip(calls, of_most, expected, strict=True):
            given = [_sliced(x, y.shape) for x, y in zip(operands, call.operands, strict=True)]
            found = emulation.run(call, given, device)
            compared = 0
            for x, y in zip(found, right, strict=True):
                if len(x) != count or y.shape[1:] != x.shape[1:] or not x.size:
                    continue  # scratch
                wide = (np.asarray(z, np.float64) for z in (x, _sliced(y, x.shape)))
                assert tolerance.rms_error(*wide) < limit, (call.target, count, device)
                compared += 1
            assert compared, call.target


EVERY_ROW = range(1, 71)
MOST_ROWS = (*range(1, 35), 63, 64, 65, 70)
SOME_ROWS = (1, 2, 3, 17)
ROWS_OF_BLOCKS = (*range(1, 10), 15, 16, 17, 23, 24, 25, 31, 32)
"""Those at the ends of what their kernels take at once: 4, 8 or 16."""

LIMITS = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}


def _few(emulation: Emulation, name: str, dtype: str, rows: int) -> list[Call]:
    """The calls of few small heads, on matrix units where the dtype is not float32."""
    if name == "block":
        return _block_calls(emulation, rows, 128, dtype)
    if name == "cross_entropy":
        return [_cross_entropy_call(rows, 64, dtype)]
    tokens, size = (17, 64) if name in OPERATORS and dtype == "bfloat16" else (3, 16)
    sizes = {"B": rows, "T": tokens, "H": 1, "K": size}
    calls = _operator_calls if name in OPERATORS else _layer_calls
    return calls(emulation, name, sizes, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((op, "float32") for op in OPERATORS),
        *((name, "bfloat16") for name in ("wkv7", "wkv6", *ELEMENTWISE)),
        ("cross_entropy", "float32"),
        *(("block", dtype) for dtype in DTYPES),
    ],
)
def test_every_number_of_rows(
    emulation: Emulation, name: str, dtype: str, pytestconfig: pytest.Config
) -> None:
    """Or of tokens, of the cross entropy. An emulated matrix product takes long."""
    calls = functools.partial(_few, emulation, name, dtype)
    every = pytestconfig.getoption("--every-row") or emulation.on_gpu
    some = SOME_ROWS if name in OPERATORS and dtype == "bfloat16" else MOST_ROWS
    most, some = (range(1, 33), ROWS_OF_BLOCKS) if name == "block" else (EVERY_ROW, some)
    rows = most if every else some
    _check_rows(emulation, calls, rows, LIMITS[dtype])
    if emulation.on_gpu and (name, dtype) == ("block", "bfloat16"):
        _check_rows(emulation, calls, MANY_ROWS[32:], LIMITS[dtype], HOPPER)


def test_blocks_of_a_large_gpu(emulation: Emulation) -> None:
    """As many blocks of threads as there is room for their sums."""
    calls = functools.partial(_block_calls, emulation, width=1088, dtype="bfloat16")
    _check_rows(emulation, calls, (32,), LIMITS["bfloat16"], [DEVICES["10.0"]])


def test_cuda_is_asked_about_a_kernel_once(emulation: Emulation) -> None:
    sizes = {"B": 2, "T": 3, "H": 1, "K": 32}
    calls = _layer_calls(emulation, "read_out", sizes, "float32")
    calls += _block_calls(emulation, 8, 128, "bfloat16")
    for call in calls:
        emulation.launches(call, DEVICES["9.0"])
    emulation.module.asked()
    for call in calls:
        assert emulation.launches(call, DEVICES["9.0"])
    assert emulation.module.asked() == 0


def test_a_launch_that_fails_leaves_no_error_behind(emulation: Emulation) -> None:
    """The emulation looks for one after each call."""
    sizes = {"B": 2, "T": 3, "H": 1, "K": 4096}
    forward, _ = _layer_calls(emulation, "norm_shift_mix", sizes, "float32")
    small = Device(132, 1024)
    with pytest.raises(RuntimeError, match="INTERNAL: norm_shift_mix: invalid argument"):
        emulation.launches(forward, small)
    assert emulation.launches(forward, DEVICES["9.0"])


def test_low_rank_maps_read_what_was_written_just_before(emulation: Emulation) -> None:
    """Their first kernel copies weights before anything else, which the kernel before may write."""
    if not emulation.on_gpu:
        pytest.skip("these kernels have no emulation")
    rng, tokens, width, rank = np.random.default_rng(0), 130, 256, 64
    narrow = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    given = [narrow(x) for x in ((1, tokens, width), (width, rank), (rank, width), (0,))]
    operands = [(rng.standard_normal(x.shape) / 8).astype(x.dtype) for x in given]
    made = [narrow((1, tokens, n)) for n in (rank, width)]
    call = Call("rwkv_low_rank_maps_v1", given, made, {}, {"activations": 0}, None)
    hidden, y = (np.asarray(x, np.float64) for x in emulation.run(call, operands, DEVICES["9.0"]))
    rows, first, second = (np.asarray(x, np.float64) for x in operands[:3])
    assert tolerance.rms_error(hidden, rows @ first) < 4e-3
    assert tolerance.rms_error(y, rows @ first @ second) < 6e-3
