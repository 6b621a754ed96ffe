#!/usr/bin/env bash
# Installs the wheels of a folder, dist by default, as a user without a compiler does, and runs the quick
# tests on them: with the CUDA kernels if a wheel has them, on a GPU if there is one.
#
#   bash scripts/check_wheels.sh [FOLDER]
#
# Environment:
#   PYTHON   the interpreter, python3 by default
#   JAX      what to install as JAX, "jax" (the newest) by default; "jax==0.10.2", for example
#   VENV     where the virtual environment is made, a temporary folder by default
set -euo pipefail
cd "$(dirname "$0")/.."

dist=$(realpath "${1:-dist}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${VENV:-$work/venv}
"${PYTHON:-python3}" -m venv "$venv"
# Nothing but the environment on PATH: no compiler, no CMake.
run() { env PATH="$venv/bin" PYTHONSAFEPATH=1 "$venv/bin/python" "$@"; }
pip() { run -m pip --quiet --disable-pip-version-check "$@"; }

distributions=(rwkv-jax)
for major in 13 12; do
  if compgen -G "$dist/rwkv_jax_cuda$major-*.whl" >/dev/null; then
    distributions+=("rwkv-jax-cuda$major")
    break
  fi
done
# The wheels by themselves, and then what the tests need.
pip install --pre --no-index --no-deps --find-links "$dist" "${distributions[@]}"
pip install --pre --find-links "$dist" --only-binary rwkv-jax "rwkv-jax[test]" "${JAX:-jax}" pyright

echo "== ${distributions[*]}: $(run --version), $(run -c 'import jax; print("jax", jax.__version__)')"
RWKV_JAX_REQUIRED=${#distributions[@]} run - <<'PYTHON_CODE'
import os

import rwkv_jax

info = rwkv_jax.build_info()
print(rwkv_jax.__version__, info)
assert info["missing"]["cpu"] is None, info
assert os.environ["RWKV_JAX_REQUIRED"] == "1" or info["missing"]["cuda"] is None, info
PYTHON_CODE

cat >"$work/typed.py" <<'PYTHON_CODE'
# pyright: strict
import jax
import rwkv_jax


def step(x: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    y, state = rwkv_jax.wkv7_step(x, x, x, x, x, x, state)
    return y, state
PYTHON_CODE
(cd "$work" && env PATH="$venv/bin:$PATH" pyright --pythonpath "$venv/bin/python" typed.py)

run -m pytest -q -n "$(nproc)" --dist worksteal -p no:cacheprovider -m "not slow" tests
