"""`rwkv_jax.layers.keyed_wkv7` by the oracles of `wkv7_keys` and `wkv7`, and how a test calls it.

Arrays are named after the arguments and results. A cotangent of a result and the gradient of an
input have a `d` in front.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import rwkv_jax
from rwkv_jax import layers
from support import harness, layer_functions, tolerance
from support.cases import Arrays, Case

TENSORS = dict.fromkeys(("r", "w", "k", "rate"), "BTHK") | {"v": "BTHV"}
PARAMETERS = dict.fromkeys(("k_k", "k_a", "a0", "r_k"), "HK")
AXES = {**TENSORS, **PARAMETERS, "initial_state": "BHVK"}
RESULTS = {"y": "BTHV", "bonus": "BTH", "final_state": "BHVK"}
FLOAT32 = (*PARAMETERS, "initial_state", "bonus", "final_state")


def operands(case: Case) -> tuple[Arrays, Arrays]:
    """Inputs, rounded to their dtype, and cotangents."""
    own = layer_functions.Case(case.B, case.T, case.H, case.K, case.dtype, seed=case.seed)
    of_keys, cotangents = layer_functions.operands("wkv7_keys", own)
    inputs, others = harness.operands("wkv7", case)
    inputs = {name: inputs[name] for name in ("w", "v", "initial_state") if name in inputs}
    return of_keys | inputs, {"dbonus": cotangents["dbonus"], **others}


def expected(
    inputs: Arrays, cotangents: Arrays, segment_ids: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Results and gradients."""
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    keys = layer_functions.wkv7_keys(wide)
    recurrent = {name: x for name, x in wide.items() if name in ("r", "w", "v", "initial_state")}
    recurrent |= {"k": keys["key"], "a": keys["a"], "b": keys["b"]}
    d = {name: np.asarray(x, np.float64) for name, x in cotangents.items()}
    outer = {name: d[name] for name in ("dy", "dfinal_state")}
    found = harness.expected("wkv7", recurrent, outer, decay="sigmoid", segment_ids=segment_ids)
    inner = {"dkey": found.pop("dk"), "da": found.pop("da"), "db": found.pop("db")}
    inner |= {"dbonus": d["dbonus"], "dpassed": found.pop("dr")}
    of_keys = layer_functions.wkv7_keys(wide, inner)
    gradients = {f"d{name}": of_keys[f"d{name}"] for name in ("k", "rate", "r", *PARAMETERS)}
    return {**found, **gradients, "bonus": keys["bonus"]}


def value_and_gradients(
    inputs: Arrays,
    cotangents: Arrays,
    *,
    function: Callable[..., Any] = layers.keyed_wkv7,
    **options: Any,
) -> dict[str, jax.Array]:
    """Results and gradients by name."""
    found, vjp = jax.vjp(lambda x: function(**x, **options)._asdict(), inputs)
    (gradients,) = vjp({name: cotangents[f"d{name}"] for name in found})
    return found | {f"d{name}": x for name, x in gradients.items()}


def apart(
    *, segment_ids: Any = None, implementation: str | None = None, **inputs: Any
) -> layers.KeyedWkv7:
    """The two functions, one after the other."""
    of_keys = {name: inputs[name] for name in ("k", "rate", "r", *PARAMETERS)}
    keys = layers.wkv7_keys(**of_keys, implementation=implementation)
    y, last = rwkv_jax.wkv7(
        *(keys.r, inputs["w"], keys.k, inputs["v"], keys.a, keys.b, inputs.get("initial_state")),
        segment_ids=segment_ids,
        decay="sigmoid",
        implementation=implementation,
    )
    return layers.KeyedWkv7(y, keys.bonus, last)


def assert_right(found: Arrays, right: Arrays, dtype: str) -> None:
    """Close to the oracle. The operands between the two functions are rounded to the dtype."""
    limits = {n: tolerance.ceiling(n, dtype, sequential=False, highest=True) for n in found}
    tolerance.assert_close({n: np.asarray(x) for n, x in found.items()}, right, limits)
    exact = {*FLOAT32, *(f"d{name}" for name in FLOAT32)}
    dtypes = {n: "float32" if n in exact else dtype for n in found}
    assert {n: str(x.dtype) for n, x in found.items()} == dtypes
