"""What the Pallas kernels of all operators share: the arithmetic of a chunk's decays, the walk over
a sequence chunk by chunk, and how that walk becomes a kernel on each platform.

What a chunk of tokens does to the state before it needs the tokens alone, so it is prepared for all
chunks side by side; then a walk along the sequence, with the state on the chip, takes few products
for each. The backward pass is such a walk for the gradient of the state, from the end. With that,
and the states of all chunks, computed again from those that were saved, the gradients of all chunks
are computed side by side.

The functions of a chunk consist of elementwise operations and of products of matrices, so that
every platform takes them as they are. On a GPU one program walks along the sequence of one head; on
a TPU, whose blocks are copied to its memory as a whole, the last axis of the grid does.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton

from rwkv_jax import _packing
from rwkv_jax._chunked import CHUNK, boundaries, states_dtype
from rwkv_jax._decay import LOG_DECAY
from rwkv_jax._dispatch import Options

INTERPRET: str | None = None
"""The platform whose kernels the interpreter of Pallas runs on CPUs, which is slow: for tests."""

PLATFORMS = ("cuda", "tpu")

HEAD_SIZES = (16, 32, 64, 128)
"""The tiles of a GPU are powers of two, and 16 is the least of a product."""

ROWS = 64
"""Rows of a state, or of its gradient, that one GPU program keeps along a sequence. They do not
depend on each other, so more value channels are more programs."""


TOKENS = 16
"""Of a chunk: fewer are too few for products of matrices, and more take more of them."""

IN_FRAME = CHUNK // TOKENS
"""Chunks from one saved state to the next."""


class Tuning(NamedTuple):
    """How a GPU program is compiled: groups of 32 threads, and loads in flight."""

    num_warps: int = 4
    num_stages: int = 1


ALONE = {16: Tuning(), 32: Tuning(), 64: Tuning(), 128: Tuning(num_warps=8)}
"""For kernels with a chunk for each program, by the larger of K and V, as measured on an H200."""

WALKS = {size: Tuning(num_stages=3) for size in (16, 32, 64)} | {128: Tuning(num_stages=2)}
FLOAT32_WALKS = WALKS | {128: Tuning(num_warps=8)}
"""For walks; more chunks of 128 do not fit every GPU."""

BOUNDED = ("sigmoid",)
"""Forms whose log decay is never below -0.61, so that a chunk's decay may be divided by."""

Arrays: TypeAlias = tuple[Array, ...]


def why_not(platform: str, stage: str, options: Options, operands: Mapping[str, Any]) -> str | None:
    if platform not in PLATFORMS and not (platform == "cpu" and INTERPRET):
        return "pallas kernels exist for CUDA GPUs and for TPUs"
    if platform == "cuda" and not _lowers_for_gpus():
        return (
            "JAX lowers pallas kernels for the kind of GPU that is here, and there is none; "
            "jax.sharding.use_abstract_mesh takes an abstract device"
        )
    key_size, value_size = operands["r"].shape[-1], operands["v"].shape[-1]
    if not {key_size, value_size} <= set(HEAD_SIZES):
        accepted = ", ".join(map(str, HEAD_SIZES))
        return f"K = {key_size} and V = {value_size}; the pallas kernels take {accepted}"
    return None


def _lowers_for_gpus() -> bool:
    known = jax.sharding.get_abstract_mesh().abstract_device is not None
    return known or jax.default_backend() == "gpu" or jax.__version_info__ < (0, 11)


def how(platform: str, options: Options, operands: Mapping[str, Any]) -> str:
    compiler = {"cuda": "Triton", "tpu": "Mosaic", "cpu": "interpreter"}[platform]
    dtype = product(options, operands["r"].dtype).dtype.__name__
    return f"Pallas kernels ({compiler}), chunks with products of {dtype} operands"


class Product(NamedTuple):
    """Products of matrices in float32, of operands in `dtype`."""

    dtype: Any
    precision: Any

    def __call__(self, x: Array, y: Array, over: tuple[int, int] = (1, 0)) -> Array:
        """The sum over an axis of `x` and an axis of `y`."""
        return lax.dot_general(
            x.astype(self.dtype),
            y.astype(self.dtype),
            (((over[0],), (over[1],)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def sums(self, chosen: Array, x: Array, over: int = 1) -> Array:
        """The sums of those rows of `x` that an axis of `chosen`, of 0, 1 and -1, says: with 16
        digits, or all where the operands of products have all."""
        add = Product(jnp.bfloat16, lax.Precision.DEFAULT)
        result = jnp.zeros_like(x)
        for _ in range(3 if self.dtype == jnp.float32 else 2):
            leading = x.astype(add.dtype)
            result += add(chosen, leading, (over, 0))
            x -= leading.astype(jnp.float32)
        return result


def product(options: Options, dtype: Any) -> Product:
    """Of 16-bit inputs in bfloat16, whose range factors need, unless the call is to be exact."""
    if dtype != jnp.float32 and options.precision != lax.Precision.HIGHEST:
        return Product(jnp.bfloat16, lax.Precision.DEFAULT)
    fast = options.precision == lax.Precision.DEFAULT
    return Product(jnp.float32, lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST)


def _places(length: int) -> tuple[Array, Array]:
    """Those of a pair of tokens."""
    i, j = (lax.broadcasted_iota(jnp.int32, (length, length), axis) for axis in (0, 1))
    return i, j


def diagonal(x: Array) -> Array:
    """The matrix with the diagonal `x` [L, 1]."""
    i, j = _places(x.shape[0])
    return jnp.where(i == j, x, 0.0)


def _row(x: Array) -> Array:
    """`x` [L, 1] as [1, L]."""
    i, j = _places(x.shape[0])
    return jnp.sum(jnp.where(i == j, x, 0), axis=0, keepdims=True)


def diagonal_of(x: Array) -> Array:
    i, j = _places(x.shape[0])
    return jnp.sum(jnp.where(i == j, x, 0.0), axis=1, keepdims=True)


def _halves(length: int) -> list[int]:
    """Half the lengths of the pieces into which a chunk is cut, and cut again."""
    return [length >> n for n in range(1, length.bit_length())]


def _of_halves(length: int, half: int) -> Array:
    """The pairs of a token in the second half of a piece, and one in the first half of it: half is
    the highest bit in which their places differ."""
    i, j = _places(length)
    differ = i ^ j
    return (i > j) & (half <= differ) & (differ < 2 * half)


def inverse(product: Product, x: Array) -> Array:
    """(I - x)^-1 for an x below the diagonal: of pieces of two tokens, of four and so on. No powers
    of x appear, which may be large where the inverse is not."""
    length = x.shape[0]
    result = diagonal(jnp.ones((length, 1), jnp.float32))
    for half in reversed(_halves(length)):
        between = jnp.where(_of_halves(length, half), x, 0.0)
        if half > 1:
            between = product(product(result, between), result)
        result += between
    return result


class Level(NamedTuple):
    """Factors [L, K] of the decay between two tokens j < i, after j and before i, for the pairs
    that `mask` has: `rows[i] * columns[j]`."""

    rows: Array
    columns: Array
    mask: Array


class Decays(NamedTuple):
    """Factors of a chunk [L, K] and of its state [1, K].

    own: the decay of each token.
    before: with `entry`, that of all tokens before one.
    after: with `leave`, that of all tokens after one.
    stay: with `entry` and `leave`, that of all tokens.
    levels: that of the tokens between two.
    """

    own: Array
    before: Array
    after: Array
    entry: Array
    stay: Array
    leave: Array
    levels: tuple[Level, ...]


class Exponents(NamedTuple):
    """The cotangents of the logarithms of `Decays`, but of `entry` and `leave`, which follow."""

    own: Array
    before: Array
    after: Array
    stay: Array
    levels: tuple[tuple[Array, Array], ...]


class Tokens(NamedTuple):
    """Which tokens of a chunk there are, and which segment each belongs to, counted from 0 at the
    one that goes on from the state before; [L, 1] each, None if all are there, or of one."""

    there: Array | None = None
    segment: Array | None = None


def log_decay(w: Array, decay: str, length: int, tokens: Tokens) -> Array:
    """That of each token [L, K], also where `w` [1, K] is the same for all. Those that are not
    there do not decay."""
    result = jnp.broadcast_to(LOG_DECAY[decay](w), (length, w.shape[1]))
    return result if tokens.there is None else jnp.where(tokens.there, result, 0.0)


def _between(length: int, half: int) -> Array:
    """1 for each token between another, of the first axis, and the middle of its piece."""
    i, t = _places(length)
    middle = (i & -(2 * half)) + half
    second = (middle <= t) & (t < i)
    first = (i < t) & (t < middle)
    return jnp.where((i >= middle) & second | (i < middle) & first, 1.0, 0.0)


def _past(length: int) -> Array:
    i, t = _places(length)
    return jnp.where(t < i, 1.0, 0.0)


def _from_middle(length: int) -> Array:
    """What sums up the tokens before one, less those of the first half."""
    _, t = _places(length)
    return _past(length) - jnp.where(t < length // 2, 1.0, 0.0)


def _first_half(x: Array) -> Array:
    i = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(i < x.shape[0] // 2, x, 0.0)


def total(x: Array) -> Array:
    return jnp.sum(x, axis=0, keepdims=True)


def decays(product: Product, log_decay: Array, decay: str, tokens: Tokens) -> Decays:
    """Where decays are bounded, one product has all pairs of tokens: factors grow away from the
    middle of the chunk, to which the state is brought and from which it is taken. Otherwise all
    factors are at most 1: a pair of tokens is in different halves of just one piece, and the
    factors lead to the middle of that. Between segments all factors are 0."""
    result = _of_one_segment(product, log_decay, decay)
    if (segment := tokens.segment) is None:
        return result
    last, same = jnp.max(segment, axis=0, keepdims=True), segment == _row(segment)
    return result._replace(
        before=jnp.where(segment == 0, result.before, 0.0),
        after=jnp.where(segment == last, result.after, 0.0),
        stay=jnp.where(last == 0, result.stay, 0.0),
        levels=tuple(x._replace(mask=x.mask & same) for x in result.levels),
    )


def _of_one_segment(product: Product, log_decay: Array, decay: str) -> Decays:
    length = log_decay.shape[0]
    own, whole = jnp.exp(log_decay), total(log_decay)
    if decay in BOUNDED:
        exponents = product.sums(_from_middle(length), log_decay)
        rows, columns = jnp.exp(exponents), jnp.exp(-(exponents + log_decay))
        first, one = total(_first_half(log_decay)), jnp.ones_like(whole)
        level = Level(rows, columns, _past(length) > 0)
        return Decays(own, rows, columns, jnp.exp(first), one, jnp.exp(whole - first), (level,))
    before = jnp.exp(product.sums(_past(length), log_decay))
    after = jnp.exp(product.sums(_past(length), log_decay, over=0))
    levels = []
    for half in _halves(length):
        factors = jnp.exp(product.sums(_between(length, half), log_decay))
        levels.append(Level(factors, factors, _of_halves(length, half)))
    one = jnp.ones_like(whole)
    return Decays(own, before, after, one, jnp.exp(whole), one, tuple(levels))


def log_decay_gradient(product: Product, exponents: Exponents, decay: str) -> Array:
    """The transpose of `decays`."""
    own, before, after, stay, levels = exponents
    length = own.shape[0]
    if decay in BOUNDED:
        ((rows, columns),) = levels
        rows, columns = rows + before, columns + after
        entry, leave = stay + total(before), stay + total(after)
        result = product.sums(_from_middle(length), rows - columns, over=0) + own - columns
        return result + leave + _first_half(jnp.broadcast_to(entry - leave, own.shape))
    result = own + stay
    result += product.sums(_past(length), before, over=0) + product.sums(_past(length), after)
    for half, (rows, columns) in zip(_halves(length), levels, strict=True):
        result += product.sums(_between(length, half), rows + columns, over=0)
    return result


def pairs(
    product: Product, levels: Sequence[Level], rows: Sequence[Array], columns: Sequence[Array]
) -> list[list[Array]]:
    """For x of the rows and y of the columns the matrix of x_i . (decay between i and j) y_j, with
    zeros where j >= i."""
    result = [[jnp.zeros((rows[0].shape[0],) * 2, jnp.float32) for _ in columns] for _ in rows]
    for level in levels:
        left = [x * level.rows for x in rows]
        right = [y * level.columns for y in columns]
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                result[i][j] += jnp.where(level.mask, product(x, y, (1, 1)), 0.0)
    return result


def pairs_gradient(
    product: Product,
    levels: Sequence[Level],
    rows: Sequence[Array],
    columns: Sequence[Array],
    d_pairs: Sequence[Sequence[Array]],
) -> tuple[list[Array], list[Array], tuple[tuple[Array, Array], ...]]:
    """Cotangents of the rows, of the columns and of the exponents of the levels."""
    d_rows = [jnp.zeros_like(x) for x in rows]
    d_columns = [jnp.zeros_like(y) for y in columns]
    exponents = []
    for level in levels:
        # Rounded as the products take them: contributions to exponents cancel each other.
        left = [(x * level.rows).astype(product.dtype) for x in rows]
        right = [(y * level.columns).astype(product.dtype) for y in columns]
        d_left = [jnp.zeros_like(x) for x in rows]
        d_right = [jnp.zeros_like(y) for y in columns]
        for i, x in enumerate(left):
            for j, y in enumerate(right):
                d_pair = jnp.where(level.mask, d_pairs[i][j], 0.0)
                d_left[i] += product(d_pair, y)
                d_right[j] += product(d_pair, x, (0, 0))
        exponents.append((_dotted(d_left, left), _dotted(d_right, right)))
        d_rows = [d + x * level.rows for d, x in zip(d_rows, d_left, strict=True)]
        d_columns = [d + x * level.columns for d, x in zip(d_columns, d_right, strict=True)]
    return d_rows, d_columns, tuple(exponents)


def _dotted(xs: Sequence[Array], ys: Sequence[Array]) -> Array:
    first, *rest = (x * y.astype(jnp.float32) for x, y in zip(xs, ys, strict=True))
    return sum(rest, first)


Named: TypeAlias = dict[str, Array]
Refs: TypeAlias = dict[str, Any]
Operands: TypeAlias = dict[str, tuple[str, Array]]
"""Arrays and their axes; `1` is an axis of length 1."""

Results: TypeAlias = dict[str, tuple[str, Any]]
"""Axes and dtypes."""

Body: TypeAlias = Callable[[Refs, int, Any, Arrays], Arrays]

PREPARED = {
    "stay": "BMH1K",
    "reads": "BTHK",
    "fresh": "BTHV",
    "keys": "BTHK",
    "solved": "BTHK",
    "own": "BTHV",
    "kept": "BTHK",
}
"""What a chunk does to the state S before it, with the names of these for what is prepared:

    Y = reads S^T + fresh
    S_after = S diag(stay) + V^T keys + U^T kept,    U = solved S^T + own

The second sum of products is of operators whose writes read the state.
"""

AFTER = ("stay", "v", "keys", "solved", "own", "kept")
BEFORE = ("stay", "dy", "reads", "solved", "kept")
"""What the state after a chunk is computed from, and the gradient of that before."""

WALKED = ("v", "dy")
"""What a walk reads as it was given. Elsewhere kernels clear what is not there; here that would
cost as much as the rest."""

Prepare: TypeAlias = Callable[[Named, Tokens], Named]
"""`(inputs, tokens) -> prepared`, for inputs [L, ...], which are 0 for tokens that are not there.
What no kernel reads is not computed."""

ChunkGradient: TypeAlias = Callable[[Named, Array, Array, Array, Tokens], Named]
"""`(inputs, state, dy, dstate, tokens) -> gradients`, from the state before and the gradient of
that after; `dy` is [L, V]."""


def forward(
    prepare: Prepare,
    options: Options,
    platform: str,
    inputs: Mapping[str, Array],
    initial_state: Array,
    marks: Array | None,
) -> tuple[Array, Array, Array]:
    """`y`, the final state and the states before each frame of CHUNK tokens. Inputs are [B, T, H,
    ...], or [B, H, K] where all tokens have the same."""
    batch, tokens, heads, _ = inputs["r"].shape
    saved = batch, boundaries(tokens) if options.save else 0, *initial_state.shape[1:]
    save_as = states_dtype(options, inputs["r"].dtype)
    nothing = jnp.broadcast_to(initial_state[:, None], saved).astype(save_as)
    if 0 in (batch, tokens, heads):
        return inputs["v"], initial_state, nothing
    chunks = _Chunks(options, platform, inputs)
    operands = chunks.prepared(prepare, chunks.given(inputs, marks), ("reads", "fresh", *AFTER))

    def body(refs: Refs, count: int, first: Any, carry: Arrays) -> Arrays:
        def one(i: Any, state: Array) -> Array:
            if options.save:

                @pl.when(lax.rem(i, IN_FRAME) == 0)
                def _():
                    chunks.put(refs, results, i, states=state)

            here = chunks.at(refs, operands, i)
            y = chunks.product(state, here["reads"], (1, 1)) + here["fresh"].T.astype(jnp.float32)
            chunks.put(refs, results, i, y=y.T)
            return _after(chunks.product, here, state)

        return (lax.fori_loop(0, count, one, *carry),)

    results: Results = {"y": ("BTHV", inputs["v"].dtype)}
    if options.save:
        results["states"] = ("BNHVK", save_as)
    named = chunks.walk(body, operands, {"state": ("BHVK", initial_state)}, results, FROM_START)
    return named["y"], named["state"], named.get("states", nothing)


def _after(product: Product, here: Named, state: Array) -> Array:
    result = state * here["stay"] + product(here["v"], here["keys"], (0, 0))
    if "solved" in here:
        u = product(state, here["solved"], (1, 1)) + here["own"].T.astype(jnp.float32)
        result += product(u, here["kept"])
    return result


def _before(product: Product, here: Named, dstate: Array) -> Array:
    """The gradient of the state before."""
    result = dstate * here["stay"] + product(here["dy"], here["reads"], (0, 0))
    if "solved" in here:
        result += product(product(dstate, here["kept"], (1, 1)), here["solved"])
    return result


def backward(
    prepare: Prepare,
    gradient: ChunkGradient,
    options: Options,
    platform: str,
    inputs: Mapping[str, Array],
    states: Array,
    dy: Array,
    dfinal_state: Array,
    marks: Array | None,
) -> tuple[Array, ...]:
    """The cotangents of the inputs in their order, and of the initial state."""
    batch, tokens, heads, _ = inputs["r"].shape
    if 0 in (batch, tokens, heads):
        return *(jnp.zeros_like(x) for x in inputs.values()), dfinal_state
    chunks = _Chunks(options, platform, inputs)
    operands = chunks.given({**inputs, "dy": dy}, marks)
    prepared = chunks.prepared(prepare, operands, {*AFTER, *BEFORE})
    needed, results = _only(prepared, BEFORE), {"dstates": ("BMHVK", states.dtype)}

    def dstates(refs: Refs, count: int, first: Any, carry: Arrays) -> Arrays:
        def one(n: Any, dstate: Array) -> Array:
            i = count - 1 - n
            chunks.put(refs, results, i, dstates=dstate)
            return _before(chunks.product, chunks.at(refs, needed, i), dstate)

        return (lax.fori_loop(0, count, one, *carry),)

    dstate: Operands = {"dstate": ("BHVK", dfinal_state)}
    found = chunks.walk(dstates, needed, dstate, results, FROM_END)
    operands["dstates"] = "BMHVK", found["dstates"]
    operands["states"] = "BMHVK", _states(chunks, _only(prepared, AFTER), states)
    gradients = _gradients(chunks, gradient, operands, list(inputs))
    return *(gradients[n].reshape(x.shape) for n, x in inputs.items()), found["dstate"]


def _only(operands: Operands, names: Sequence[str]) -> Operands:
    return {name: operands[name] for name in names if name in operands}


def _states(chunks: "_Chunks", prepared: Operands, states: Array) -> Array:
    """Those before each chunk, from those before each frame."""
    results = {"result": ("BMHVK", states.dtype)}

    def body(refs: Refs, count: int, first: Any, carry: Arrays) -> Arrays:
        def one(i: Any, state: Array) -> Array:
            chunks.put(refs, results, i, result=state)
            return _after(chunks.product, chunks.at(refs, prepared, i), state)

        lax.fori_loop(0, count, one, refs["states"][0].astype(jnp.float32))
        return ()

    operands = prepared | {"states": ("BNHVK", states)}
    return chunks.walk(body, operands, {}, results, SIDE_BY_SIDE)["result"]


def _gradients(
    chunks: "_Chunks", gradient: ChunkGradient, operands: Operands, inputs: Sequence[str]
) -> Named:
    """Those of the inputs."""
    shared = [name for name in inputs if "T" not in operands[name][0]]
    of_tokens = {f"d{n}": operands[n] for n in inputs if n not in shared}
    results: Results = {n: (axes, x.dtype) for n, (axes, x) in of_tokens.items()}
    results |= {f"d{n}": ("BMH1K", jnp.float32) for n in shared}

    def body(refs: Refs, count: int, first: Any, carry: Arrays) -> Arrays:
        here, tokens = chunks.here(refs, operands, first)
        state, dstate = (here.pop(name).astype(jnp.float32) for name in ("states", "dstates"))
        found = gradient(here, state, here.pop("dy"), dstate, tokens)
        chunks.put(refs, results, 0, **{f"d{name}": x for name, x in found.items()})
        return ()

    named = chunks.each(body, operands, results)
    return {n: jnp.sum(named[f"d{n}"], 1) if n in shared else named[f"d{n}"] for n in inputs}


class _Chunks:
    """How a call is cut into chunks, and what runs on them."""

    def __init__(self, options: Options, platform: str, inputs: Mapping[str, Array]) -> None:
        r, v = inputs["r"], inputs["v"]
        self.product = product(options, r.dtype)
        size = max(r.shape[-1], v.shape[-1])
        walks = FLOAT32_WALKS if self.product.dtype == jnp.float32 else WALKS
        self._alone, self._walk, self._platform = ALONE[size], walks[size], platform
        self._tokens = r.shape[1]

    def given(self, inputs: Mapping[str, Array], marks: Array | None) -> Operands:
        """The operands of kernels: the inputs with their axes, of which those of a whole head get
        one more, since blocks have two, and what `here` reads of the marks."""
        operands: Operands = {}
        for name, x in inputs.items():
            if name in WALKED:
                operands[name] = "BTHV", _packing.cleared(marks, [x])[0]
            else:
                operands[name] = ("BTHK", x) if x.ndim == 4 else ("BH1K", x[:, :, None])
        if marks is not None:
            operands["tokens"] = "BT1", self._numbered(marks)[:, :, None]
        return operands

    def _numbered(self, marks: Array) -> Array:
        """The segment of each token, counted from 1 in each chunk, and negative for those that are
        not there; 0 is what arrays are filled up with."""
        tokens = marks.shape[1]
        whole = jnp.pad(marks, ((0, 0), (0, -tokens % TOKENS)))
        number = 1 + _packing.segments(whole.reshape(-1, TOKENS)).reshape(whole.shape)[:, :tokens]
        return jnp.where(marks == _packing.ABSENT, -number, number)

    def at(self, refs: Refs, operands: Operands, i: Any) -> Named:
        """The arrays of chunk `i`."""
        return {name: refs[name][self._place(axes, i)] for name, (axes, _) in operands.items()}

    def put(self, refs: Refs, results: Results, i: Any, **arrays: Array) -> None:
        """Results of chunk `i`, or of its frame."""
        for name, x in arrays.items():
            refs[name][self._place(results[name][0], i)] = x.astype(refs[name].dtype)

    def _place(self, axes: str, i: Any) -> Any:
        of_frame = lax.div(i, IN_FRAME) if "N" in axes else 0
        where = {"T": pl.ds(i * TOKENS, TOKENS), "M": i, "N": of_frame}
        return next((where[a] for a in axes if a in where), ...)

    def here(self, refs: Refs, operands: Operands, number: Any) -> tuple[Named, Tokens]:
        """The arrays of the only chunk that a kernel has, of that number in the sequence, with
        zeros for tokens that are not there, and which tokens there are."""
        arrays = self.at(refs, operands, 0)
        if "tokens" in arrays:
            numbers = arrays.pop("tokens")
            there = numbers > 0
            for name in (n for n in arrays if n not in WALKED and "T" in operands[n][0]):
                arrays[name] = jnp.where(there, arrays[name], jnp.zeros_like(arrays[name]))
            return arrays, Tokens(there, jnp.maximum(jnp.abs(numbers), 1) - 1)
        if self._tokens % CHUNK == 0:
            return arrays, Tokens()
        place = lax.broadcasted_iota(jnp.int32, (TOKENS, 1), 0)
        return arrays, Tokens(number * TOKENS + place < self._tokens)

    def prepared(self, prepare: Prepare, operands: Operands, names: Collection[str]) -> Operands:
        """What walks read: what is prepared, as far as it is named, the values, and `dy` if it is
        there."""
        inputs = {n: x for n, x in operands.items() if n != "dy"}
        one = {n: jax.ShapeDtypeStruct(self._of_chunk(*x), x[1].dtype) for n, x in inputs.items()}
        found = jax.eval_shape(lambda one: prepare(one, Tokens()), one)
        results: Results = {n: (PREPARED[n], self.product.dtype) for n in found if n in names}
        results["stay"] = PREPARED["stay"], jnp.float32

        def body(refs: Refs, count: int, first: Any, carry: Arrays) -> Arrays:
            found = prepare(*self.here(refs, inputs, first))
            self.put(refs, results, 0, **{n: found[n] for n in results})
            return ()

        made = self.each(body, inputs, results)
        walked = {n: x for n, x in operands.items() if n in WALKED}
        return walked | {name: (PREPARED[name], x) for name, x in made.items()}

    def _of_chunk(self, axes: str, x: Array) -> tuple[int, ...]:
        sizes = dict(zip(axes, x.shape, strict=True)) | {"T": TOKENS}
        return tuple(sizes[a] for a in axes if a not in "BH")

    def each(self, body: Body, operands: Operands, results: Results) -> Named:
        """One chunk for each program."""
        return _walk(
            *(body, self._platform, operands, {}, results),
            rows=max(HEAD_SIZES),
            tuning=self._alone,
            order=SIDE_BY_SIDE,
            span=TOKENS,
        )

    def walk(
        self, body: Body, operands: Operands, carried: Operands, results: Results, order: str
    ) -> Named:
        return _walk(
            *(body, self._platform, operands, carried, results),
            rows=ROWS,
            tuning=self._walk,
            order=order,
        )


FROM_START, FROM_END, SIDE_BY_SIDE = "from start", "from end", "side by side"


def _walk(
    body: Body,
    platform: str,
    operands: Operands,
    carried: Operands,
    results: Results,
    *,
    rows: int,
    tuning: Tuning,
    order: str,
    span: int = CHUNK,
) -> Named:
    """The results, and what was carried to the end, by name.

    `body(refs, chunks, first, carry)` does so many chunks, the first of which has that number, on
    references by name, for so many rows of V on a GPU. Spans of tokens side by side, with nothing
    carried, are programs; otherwise a GPU program does all of them, and on a TPU one after another
    is copied to the chip, where what is carried lies in between.
    """
    on_tpu = (INTERPRET if platform == "cpu" else platform) == "tpu"
    given = operands | carried
    made = results | {name: (axes, x.dtype) for name, (axes, x) in carried.items()}
    sizes = {a: n for axes, x in given.values() for a, n in zip(axes, x.shape, strict=True)}
    sizes["1"] = 1
    tokens, whole = sizes["T"], not on_tpu and order != SIDE_BY_SIDE

    def cut(length: int) -> dict[str, int]:
        """So many tokens, and the frames and chunks that these are."""
        return {"T": length, "N": length // CHUNK, "M": length // TOKENS}

    padded = boundaries(tokens) * CHUNK
    span = padded if whole else span
    chunks, spans = span // TOKENS, padded // span
    sizes |= cut(padded)
    block = sizes | cut(span) | {"B": None, "H": None}

    def number(n: Any) -> Any:
        """The span of place n in the grid."""
        return spans - 1 - n if order == FROM_END else n

    parts, heads = 1, sizes["H"]
    if not on_tpu:
        block["V"] = min(sizes["V"], rows)
        parts = sizes["V"] // block["V"]

    def place(i: Any, n: Any = 0) -> dict[str, Any]:
        head = lax.div(i, parts)
        here = {"B": lax.div(head, heads), "H": lax.rem(head, heads), "V": lax.rem(i, parts)}
        return here if whole else here | dict.fromkeys("TNM", number(n))

    def arranged(axes: str) -> str:
        """On a TPU the two axes of a block have to be the last ones."""
        return "".join(sorted(axes, key=lambda a: a not in "BH")) if on_tpu else axes

    def spec(axes: str) -> pl.BlockSpec:
        shape = tuple(block[a] for a in arranged(axes))
        return pl.BlockSpec(shape, lambda *i: tuple(place(*i).get(a, 0) for a in arranged(axes)))

    def laid_out(axes: str, x: Array) -> Array:
        missing = [sizes[a] - n for a, n in zip(axes, x.shape, strict=True)]
        if any(missing):
            x = jnp.pad(x, [(0, n) for n in missing])
        return x.transpose([axes.index(a) for a in arranged(axes)])

    def taken(axes: str, x: Array) -> Array:
        x = x.transpose([arranged(axes).index(a) for a in axes])
        return x[:, :tokens] if "T" in axes else x

    def kernel(*refs: Any) -> None:
        starts, ends = refs[len(operands) : len(given)], refs[len(refs) - len(carried) :]
        inner = (*refs[: len(operands)], *refs[len(given) :])
        named = dict(zip((*operands, *results), inner, strict=False))
        first = 0 if whole else number(pl.program_id(1)) * chunks
        if on_tpu:
            step = pl.program_id(1)

            @pl.when(step == 0)
            def _():
                for start, end in zip(starts, ends, strict=True):
                    end[...] = start[...]

            starts = ends
        carry = body(named, chunks, first, tuple(start[...] for start in starts))
        for end, x in zip(ends, carry, strict=True):
            end[...] = x

    if on_tpu:
        along = "parallel" if order == SIDE_BY_SIDE else "arbitrary"
        parameters: Any = pltpu.CompilerParams(dimension_semantics=("parallel", along))
    else:
        parameters = pltriton.CompilerParams(tuning.num_warps, tuning.num_stages)
    first, *_ = (x for _, x in given.values())
    call = pl.pallas_call(
        kernel,
        [_type(first, [sizes[a] for a in arranged(axes)], dtype) for axes, dtype in made.values()],
        grid=(sizes["B"] * heads * parts, *([] if whole else [spans])),
        in_specs=[spec(axes) for axes, _ in given.values()],
        out_specs=[spec(axes) for axes, _ in made.values()],
        compiler_params=parameters,
        interpret=platform == "cpu",
        name="_".join(("wkv", *results)),
    )
    with jax.enable_x64(False):  # for the type of indices
        out = call(*(laid_out(axes, x) for axes, x in given.values()))
    return {n: taken(axes, x) for (n, (axes, _)), x in zip(made.items(), out, strict=True)}


def _type(like: Array, shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """One that varies over the same mesh axes."""
    return jax.eval_shape(lambda x: jnp.zeros_like(x, shape=shape, dtype=dtype), like)
